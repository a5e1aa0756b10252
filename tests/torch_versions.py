"""What tests use that the oldest supported PyTorch lacks: they are skipped there, and say which one they need.

Nothing here imports PyTorch.
"""

from __future__ import annotations

import pytest

from horovod.comm.engine import is_at_least, version_of
from horovod.comm.gloo.engine import OLDEST, GlooEngine


def needs_torch(version: str, what: str) -> pytest.MarkDecorator:
    """Skips a test, or a parameter's, where PyTorch is older. ``what`` came with that version."""
    older = not is_at_least(version_of("torch"), version)
    return pytest.mark.skipif(older, reason=f"needs PyTorch {version}: {what}")


needs_scaler = needs_torch("2.3", 'torch.amp.GradScaler("cpu")')
needs_fused = needs_torch("2.4", "fused optimizers on the CPU")
needs_swapping = needs_torch("2.3", "parameters that are swapped by module.to()")
needs_sixteen_bits = needs_torch("2.3", "linear layers and losses in 16 bits on the CPU")
needs_adagrad_that_grows = needs_torch("2.13", "state of Adagrad for parameters that come later, perhaps before 2.13")
needs_lasting_hooks = needs_torch("2.13", "step hooks that torch.compile() does not remove, perhaps before 2.13")

GLOO = ["gloo"] if GlooEngine().installed() else []
"""For tables of engines."""

needs_gloo = needs_torch(OLDEST, "Gloo with a time limit that changes")
