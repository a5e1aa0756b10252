"""Train a Wide ResNet to classify clothes, with one process for each device.

horovodrun -np 2 python fashion_mnist_solution.py

This is the script after the lab's last step. A numbered comment marks what the step of that number added.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from lab import Checkpoints, Report, StopAtAccuracy, data, parse_options, wide_resnet
from novograd import NovoGrad

import horovod.keras as hvd

# 1: this process learns its rank, and uses the GPU with the number of its local rank
hvd.init()
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

options = parse_options()
verbose = hvd.rank() == 0  # 2: only rank 0 prints

images = data.load(options.data, hvd, options.images)
learning_rate = options.base_lr * hvd.size()  # 8: the batch is larger by this factor

checkpoints = Checkpoints(options.log_dir / "checkpoints" if options.use_checkpointing else None)
# 7: one rank looks for a checkpoint, so all ranks resume at the same epoch
first_epoch = checkpoints.newest() if hvd.rank() == 0 else 0
first_epoch = int(hvd.broadcast(first_epoch, 0, name="first_epoch"))
if first_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(checkpoints.path(first_epoch), custom_optimizers=[NovoGrad])
else:
    model = wide_resnet(images.shape, images.classes, options.depth, options.width, options.wd)
    # 10: for large batches; normalises the gradient of each layer
    optimizer = NovoGrad(learning_rate, grad_averaging=True)
    # 3: gradients are averaged over the ranks, by a collective that XLA cannot compile
    optimizer = hvd.DistributedOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)


def drops(epoch: float) -> float:
    """What remains of the learning rate: a tenth of it after the first drop, a hundredth after the second."""
    return 0.1 ** sum(epoch >= drop for drop in options.drop_epochs)


callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # 4: all ranks start with the weights of rank 0
    hvd.callbacks.MetricAverageCallback(),  # 6: before the callbacks that use the metrics
    # 9: warm up to the learning rate, and lower it at the given epochs
    hvd.callbacks.LearningRateWarmupCallback(learning_rate, options.warmup_epochs, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(learning_rate, drops, start_epoch=options.warmup_epochs),
    Report(options.log_dir, options.batch_size * hvd.size(), verbose),
    StopAtAccuracy(options.target_accuracy, options.patience),
]
# 7: one rank writes checkpoints
if hvd.rank() == 0:
    callbacks.append(checkpoints)

model.fit(
    # 5: each rank has its own part of the images, so an epoch has fewer steps
    images.training(options.batch_size, hvd.rank(), hvd.size()),
    steps_per_epoch=data.steps(images.train_count, options.batch_size * hvd.size()),
    validation_data=images.validation(options.val_batch_size),
    validation_steps=data.steps(3 * images.test_count, options.val_batch_size * hvd.size()),
    initial_epoch=first_epoch,
    epochs=options.epochs,
    callbacks=callbacks,
    shuffle=False,  # the data pipeline shuffles
    verbose=2 if verbose else 0,
)

loss, accuracy = model.evaluate(images.testing(options.val_batch_size), verbose=0)
if verbose:
    print(f"test loss {loss:.4f}, test accuracy {accuracy:.2%}")
