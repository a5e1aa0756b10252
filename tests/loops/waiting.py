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
}
