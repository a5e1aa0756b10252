"""The loops that are wrong at present, by what each waits for. The test of such a loop fails when the loop becomes right."""

from __future__ import annotations

COMPARISON = "ranks do not compare gradients and parameters after the first step"

WAITING: dict[str, str] = {
    "gradients_divided_by_each_ranks_count": COMPARISON,
    "noise_of_each_rank": COMPARISON,
    "a_clip_on_one_rank": COMPARISON,
    "a_checkpoint_loaded_on_one_rank": COMPARISON,
    "gradients_written_over_by_each_ranks_own": COMPARISON,
    "gradients_weighed_by_each_ranks_losses": COMPARISON,
    "parameters_scaled_by_each_ranks_loss": COMPARISON,
    "noise_in_one_step": COMPARISON,
    "units_reset_in_one_step": COMPARISON,
    "nan_dropped_on_one_rank": COMPARISON,
    "the_optimizers_state_cleared_on_one_rank": COMPARISON,
    "a_clip_where_a_rank_makes_no_pass": COMPARISON,
    "a_parameter_out_of_its_group_clipped": COMPARISON,
    "a_large_table_of_which_one_row_is_reset": COMPARISON,
    "lookahead_weights_by_each_ranks_loss": COMPARISON,
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
