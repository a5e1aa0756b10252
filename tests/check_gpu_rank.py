"""One rank of a section of ``horovodrun --check-gpu`` on a device that is late, with NCCL's calls in C: for the test of it.

python check_gpu_rank.py LIBRARY SECTION
"""

from __future__ import annotations

import sys

import torch

import late_device
from horovod.check_gpu import sections

if __name__ == "__main__":
    with late_device.with_nccl(sys.argv[1]) as stand_in:
        sections.run(sys.argv[2], torch.device("late:0"))
        told = [*stand_in.breaches(), *late_device.violations()]
    if told:
        sys.exit(f"rules were broken: {told}")
