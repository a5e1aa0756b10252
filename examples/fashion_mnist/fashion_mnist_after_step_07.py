"""Step 7: rank 0 writes the checkpoints, and broadcasts the epoch at which training resumes.

horovodrun -np 2 python fashion_mnist_after_step_07.py
"""

from __future__ import annotations

import keras
import tensorflow as tf
from lab import Checkpoints, Report, StopAtAccuracy, data, parse_options, wide_resnet

import horovod.keras as hvd

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

options = parse_options()
verbose = hvd.rank() == 0

images = data.load(options.data, hvd, options.images)

checkpoints = Checkpoints(options.log_dir / "checkpoints" if options.use_checkpointing else None)
first_epoch = checkpoints.newest() if hvd.rank() == 0 else 0
first_epoch = int(hvd.broadcast(first_epoch, 0, name="first_epoch"))
if first_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(checkpoints.path(first_epoch))
else:
    model = wide_resnet(images.shape, images.classes, options.depth, options.width, options.wd)
    optimizer = keras.optimizers.SGD(options.base_lr, options.momentum, nesterov=True)
    optimizer = hvd.DistributedOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    Report(options.log_dir, options.batch_size * hvd.size(), verbose),
    StopAtAccuracy(options.target_accuracy, options.patience),
]
if hvd.rank() == 0:
    callbacks.append(checkpoints)

model.fit(
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
