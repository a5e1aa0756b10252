"""``python -m horovod.top`` and ``horovodrun --top``: what a running job does, and where its ranks wait, every second.

Rank 0 of the job answers (:mod:`horovod.core.lifecycle.live_server`). Here its address is found (``query``), and what it says
is shown (``view``). Nothing here runs in a job, and no framework is imported.
"""
