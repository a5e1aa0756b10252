"""``python -m horovod.check_gpu`` is ``horovodrun --check-gpu``; under a launcher it is one rank of a section."""

from __future__ import annotations

import os
import sys

from horovod._base import config
from horovod.runner import gpu_report


def main(arguments: list[str]) -> int:
    if config.RANK not in os.environ:
        return gpu_report.main(arguments)
    from horovod.check_gpu import sections

    sections.run(arguments[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
