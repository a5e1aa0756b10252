"""Three models that strain a training step in three ways, with a batch each of a size that one core can bear: their sizes.

What decides how well training scales is the time of a step over the bytes of its gradients. On the machine these were
chosen on (one thread, 2026) the compute-bound network has about 8 ms of step for each megabyte, the communication-bound
one about 1 ms; the transformer lies between, but spreads its gradients over many small tensors.

The models themselves are in ``workloads_torch.py`` and ``workloads_keras.py``, as each framework's users write them.
"""

from __future__ import annotations

MODELS = ("cnn", "mlp", "transformer")

CLASSES = 10
"""What the CNN and the MLP tell apart."""

# cnn: ResNet-18 for images of 32 x 32, 11.2 million parameters, compute-bound.
IMAGES = 20
SIDE = 32
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Channels, and the stride of the first of two residual blocks."""

# mlp: six dense layers, 25.2 million parameters in 14 tensors, communication-bound.
ROWS = 64
WIDTH = 2048
LAYERS = 6

# transformer: a narrow encoder of 5.7 million parameters, most tensors a few hundred bytes to 600 KB, that predicts one
# token for each position.
SEQUENCES = 5
LENGTH = 64
VOCABULARY = 1000
EMBEDDING = 192
HEADS = 6
BLOCKS = 12


def resnet50_parameters() -> list[int]:
    """How many elements each of ResNet-50's 161 parameters has, in the order of its layers; 25.6 million in all.

    He et al., "Deep Residual Learning for Image Recognition" (2015), table 1: four stages of bottleneck blocks (1x1, 3x3,
    1x1 convolutions, each followed by a batch normalisation with two parameters), the first block of a stage with a 1x1
    projection beside it, and a dense layer for 1,000 classes.
    """

    def convolution(inputs: int, outputs: int, kernel: int) -> list[int]:
        return [inputs * outputs * kernel**2, outputs, outputs]

    parameters = convolution(3, 64, 7)
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            parameters += (
                convolution(inputs, width, 1) + convolution(width, width, 3) + convolution(width, 4 * width, 1)
            )
            if block == 0:
                parameters += convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*parameters, inputs * 1000, 1000]
