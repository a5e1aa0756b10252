"""NCCL, and RCCL on ROCm: the engine for the memory of GPUs."""
