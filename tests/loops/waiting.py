"""The loops that are wrong at present, by what each waits for. The test of such a loop fails when the loop becomes right."""

from __future__ import annotations

WAITING: dict[str, str] = {
    "reduced_gradients_divided_by_each_ranks_count_in_train_step-jax": (
        "a comparison of parameters in training steps of the script's own on JAX"
    ),
}
"""By the name of the loop, with the backend behind it if it is wrong only there."""
