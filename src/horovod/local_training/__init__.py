"""Local training: the ranks of each host train together, and the hosts rarely exchange parameters. It depends on no framework.

    outer_sgd         the optimizer that steps with the averaged changes of the hosts
    local_schedule    the checked arguments, and which fragment is sent or arrives after which step
    outer_rounds      the outer parameters of a rank: sends changes, applies their averages, and is saved
    outer_comparison  compares outer parameters across hosts

Sources: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023 (arXiv:2311.08105);
Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (arXiv:2501.18512).
"""
