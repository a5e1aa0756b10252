"""Elastic jobs: hosts come and go, survivors keep their processes, and a policy decides which processes train in a round."""
