"""Compression of gradients."""

from horovod.torch.compression.compressors import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
