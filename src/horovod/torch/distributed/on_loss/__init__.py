"""``--on-loss continue``: a script over the default group goes on with the ranks that are left, and is not changed.

    call_log               which calls have been made, completed and handed out; pure
    repeatable_call        one call, with what it takes to make it again
    carrier                the ranks that carry calls out, from one loss to the next
    continuing_submission  the script's side: takes its calls, and shows it the ranks
    survivor               hands out results, and takes the group to the next carrier after a loss
    continuing_group       the group, and what it refuses
    refusals               what else cannot go on
    samplers               makes a DistributedSampler again at set_epoch()
    votes                  how the ranks that are left agree

See docs/design/on-loss.md.
"""
