"""``python -m horovod.diagnose DIR``: explains what happened in a job, from the files of its ranks.

The ranks write :mod:`horovod.observe.dump` files. Here they are read, their clocks are aligned (``clocks``), and rules say what
happened (``findings``), as text (``report``), as JSON, as a picture (``plot``) or in the format of PyTorch's flight recorder
(``pytorch``). Nothing here runs in a job, and no framework is imported.
"""
