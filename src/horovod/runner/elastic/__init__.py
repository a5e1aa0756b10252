"""Elastic jobs: hosts are added and lost, survivors keep their processes, and a policy decides which processes train."""
