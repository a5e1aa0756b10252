"""The loops that are wrong at present, by what each waits for. The test of such a loop fails when the loop becomes right."""

from __future__ import annotations

COMPARISON = "ranks do not compare gradients and parameters after the first step, but for PyTorch's optimizers"

WAITING: dict[str, str] = {
    "reduced_gradients_divided_by_each_ranks_count_of_a_tape": COMPARISON,
    "reduced_gradients_divided_by_each_ranks_count_of_an_optimizer": COMPARISON,
    "reduced_gradients_clipped_on_one_rank_of_a_tape": COMPARISON,
    "reduced_gradients_clipped_on_one_rank_of_an_optimizer": COMPARISON,
    "a_checkpoint_of_variables_loaded_on_one_rank": COMPARISON,
    "the_state_of_adam_cleared_on_one_rank": COMPARISON,
    "reduced_gradients_divided_by_each_ranks_count_in_train_step": COMPARISON,
    "weights_set_on_one_rank": COMPARISON,
    "the_state_of_adam_cleared_in_fit_on_one_rank": COMPARISON,
}
