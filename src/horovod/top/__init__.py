"""``python -m horovod.top`` and ``horovodrun --top``: what a running job does, and where its ranks wait, every second.

Rank 0 of the job answers (:mod:`horovod.core.lifecycle.live_server`). ``query`` finds its address and asks it; ``view`` shows
the answer. Nothing here runs in a job, and no framework is imported.
"""
