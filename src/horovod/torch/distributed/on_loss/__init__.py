"""``--on-loss continue``: a script over the default group goes on with the ranks that are left, and is not changed.

    call_log     which calls have been made, completed and handed out; pure
    kept_call    one call, with what it takes to make it again
    carrier      the ranks that carry calls out, from one loss to the next
    submission   the script's side: takes its calls, and shows it the ranks
    survivor     hands out results, and takes the group to the next carrier after a loss
    group        the group, and what it refuses
    refusals     what else cannot go on
    samplers     makes a DistributedSampler anew at set_epoch()

See docs/design/on-loss.md.
"""
