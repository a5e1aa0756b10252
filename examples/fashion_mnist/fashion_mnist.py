"""Train a Wide ResNet to classify clothes, in one process. The lab begins with this script.

python fashion_mnist.py
"""

from __future__ import annotations

import keras
from lab import Checkpoints, Report, StopAtAccuracy, data, parse_options, wide_resnet

options = parse_options()

images = data.load(options.data, limit=options.images)

checkpoints = Checkpoints(options.log_dir / "checkpoints" if options.use_checkpointing else None)
first_epoch = checkpoints.newest()
if first_epoch > 0:
    model = keras.models.load_model(checkpoints.path(first_epoch))
else:
    model = wide_resnet(images.shape, images.classes, options.depth, options.width, options.wd)
    optimizer = keras.optimizers.SGD(options.base_lr, options.momentum, nesterov=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

callbacks = [
    Report(options.log_dir, options.batch_size),
    StopAtAccuracy(options.target_accuracy, options.patience),
    checkpoints,
]

model.fit(
    images.training(options.batch_size),
    steps_per_epoch=data.steps(images.train_count, options.batch_size),
    validation_data=images.validation(options.val_batch_size),
    validation_steps=data.steps(images.test_count, options.val_batch_size),
    initial_epoch=first_epoch,
    epochs=options.epochs,
    callbacks=callbacks,
    shuffle=False,  # the data pipeline shuffles
    verbose=2,
)

loss, accuracy = model.evaluate(images.testing(options.val_batch_size), verbose=0)
print(f"test loss {loss:.4f}, test accuracy {accuracy:.2%}")
