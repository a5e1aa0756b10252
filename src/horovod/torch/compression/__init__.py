"""Compression of gradients: casts of single tensors, and compressors of whole buckets (PowerSGD, top-k)."""

from horovod.torch.compression.compressors import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
