"""``python -m horovod.timeline FILE``: summarizes a timeline.

The file is one that :class:`horovod.observe.timeline.Timeline` has written. Here it is read (``collectives``) and summed up
(``summary``), and shown as text (``report``), as a picture (``plot``) or as a page for a browser (``page``). Nothing here runs
in a job, and no framework is imported.
"""
