"""The version of this distribution. ``pyproject.toml`` and :func:`horovod.build_info` read it here, and nowhere else.

It has two parts, as in PEP 440's local versions: the version of the interface, which scripts and libraries compare (``==
"0.28.1"``, ``< "0.29"``), and after the plus sign that of this implementation.
"""

VERSION = "0.28.1+pure.1"
INTERFACE = VERSION.partition("+")[0]
