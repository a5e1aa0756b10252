"""What each rank does for ``horovodrun --check-gpu``: :mod:`~horovod.check_gpu.sections` on PyTorch tensors, and the comparison
with torch.distributed in :mod:`~horovod.check_gpu.speed`. :mod:`horovod.runner.gpu_report` starts the ranks and writes the
report."""
