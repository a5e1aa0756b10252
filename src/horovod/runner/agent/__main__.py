"""``python -m horovod.runner.agent``: see :mod:`horovod.runner.agent.program`."""

from __future__ import annotations

from horovod.runner.agent.program import main

main()
