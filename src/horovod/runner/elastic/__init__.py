"""Elastic jobs: hosts come and go, survivors keep their processes, and a policy decides who trains in which round."""
