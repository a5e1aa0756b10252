"""The engine over PyTorch's Gloo, without torch.distributed's own groups."""
