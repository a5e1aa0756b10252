"""``python -m horovod.check_gpu`` is ``horovodrun --check-gpu``; with the name of a section it is one rank of that section."""

from __future__ import annotations

import sys

from horovod.runner import check_gpu


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        return check_gpu.main(arguments)
    from horovod.check_gpu import sections

    sections.run(arguments[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
