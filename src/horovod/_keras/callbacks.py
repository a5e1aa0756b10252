"""The callbacks without their base class, which depends on the version of Keras.

``horovod.keras.callbacks`` and ``horovod.tensorflow.keras.callbacks`` derive from these and from their own ``Callback``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from horovod._keras import learning_rate
from horovod._keras.broadcasting import BroadcastGlobalVariables as BroadcastGlobalVariables
from horovod._keras.values import highest
from horovod._models.contents import described
from horovod.common.basics import rank, size
from horovod.core.lifecycle.context import running
from horovod.core.negotiation.messages import Operation
from horovod.core.submission.collectives import make_request, submit


class _NotGiven:
    """Stands for an argument that was not given. Signatures show its text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


UNSET: Final[Any] = _NotGiven("the optimizer's learning rate")
_REQUIRED: Final[Any] = _NotGiven("required")
_GIVEN: Final = -1


class MetricAverage:
    """At the end of an epoch, replace every number in the logs by its average over all ranks.

    Put it before callbacks that use these numbers (early stopping, checkpoints, learning rates), so that they make the same
    decision on all ranks. The logs must have the same keys on every rank. Validation on rank 0 alone is an error.

    Args:
        device: accepted for compatibility.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if _is_number(value))
        if not names:
            return
        averages = np.array([float(np.asarray(logs[name])) for name in names], np.float64)
        tensors = [described(averages)]
        label = "MetricAverageCallback"
        labels = [f"averages of {len(names)} metrics"]
        line = f"the end of epoch {epoch + 1}, where the metrics are {', '.join(names)}"
        request = make_request(Operation.ALLREDUCE, "", label, tensors, line=line, labels=labels, transient=True)
        submit(0, request, tensors, tensors).wait()
        logs.update(zip(names, averages.tolist(), strict=True))


def _is_number(value: Any) -> bool:
    try:
        float(np.asarray(value))
    except (TypeError, ValueError):
        return False
    return True


class LearningRateSchedule:
    """Set the learning rate to ``initial_lr * multiplier(epoch)``, from epoch ``start_epoch`` until before ``end_epoch``.

    Args:
        initial_lr: the default is the optimizer's learning rate when training begins. If it differs between ranks, for example
            because one rank continues from a checkpoint, the highest is used.
        multiplier: a function of the epoch, or a number m, which means ``m ** (epoch - start_epoch)``. If ``initial_lr`` is
            not given, m is a constant factor, as older scripts expect. In a later generation, ranks that have arrived since
            take over the rate that the others began with.
        start_epoch, end_epoch: the first epoch, counted from 0, and the epoch after the last. None: no end.
        staircase: set one learning rate for each epoch. Otherwise it is set for each batch, with fractional epochs.
        momentum_correction: see :func:`horovod._keras.learning_rate.carry_momentum`.
        steps_per_epoch: the number of batches of an epoch. Required without ``staircase`` if Keras does not know it.

    Raises:
        ValueError: ``initial_lr`` is None, or, in ``fit``, the number of steps is not known.
        TypeError: ``multiplier`` is missing.
    """

    model: Any
    params: Any

    def __init__(
        self,
        initial_lr: Any = UNSET,
        multiplier: Any = _REQUIRED,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if multiplier is _REQUIRED and callable(initial_lr):
            initial_lr, multiplier = UNSET, initial_lr  # in older scripts it is the first argument
        if multiplier is _REQUIRED:
            raise TypeError("multiplier is missing: a number, or a function of the epoch")
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required; leave it out to take the optimizer's")
        self.initial_lr = initial_lr
        self._known_in: int | None = None if initial_lr is UNSET else _GIVEN  # the generation whose ranks all know it
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        elif initial_lr is UNSET:
            self.multiplier = lambda epoch: multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        if self._known_in not in (_GIVEN, generation := running().generation):
            known = highest(-math.inf if self.initial_lr is UNSET else float(self.initial_lr))
            self.initial_lr = known if known > -math.inf else highest(learning_rate.get(self.model.optimizer))
            self._known_in = generation
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self._steps()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            if not self.steps_per_epoch:
                self.steps_per_epoch = self._steps()
            self._adjust(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = learning_rate.get(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = learning_rate.get(optimizer), float(self.initial_lr * self.multiplier(epoch))
        learning_rate.put(optimizer, new)
        if self.momentum_correction and old > 0 and not np.isclose(old, new, rtol=1e-7, atol=0.0):
            learning_rate.carry_momentum(optimizer, new / old)

    def _steps(self) -> int:
        params = self.params or {}
        if params.get("steps"):
            return int(params["steps"])
        if params.get("samples") and params.get("batch_size"):
            return int(params["samples"] // params["batch_size"])
        raise ValueError(
            "Could not autodetect the number of steps per epoch. "
            f"Pass steps_per_epoch to {type(self).__name__}; Keras says {sorted(params)}."
        )


class LearningRateWarmup(LearningRateSchedule):
    """Raise the learning rate from ``initial_lr / size`` to ``initial_lr`` during the first epochs, batch by batch.

    Source: Goyal et al. 2017, Accurate, Large Minibatch SGD, section 2.2.

    Args:
        initial_lr: the learning rate after the warm-up, usually that of one process times ``hvd.size()``. The default is the
            optimizer's.
        warmup_epochs: the number of epochs of the warm-up.
        momentum_correction, steps_per_epoch: as for :class:`LearningRateSchedule`.
        verbose: if above 0, rank 0 prints a line at the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: Any = UNSET,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            done = epoch + 1.0 / self.steps_per_epoch
            return 1.0 / size() * (done * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and rank() == 0:
            rate = learning_rate.get(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.", flush=True)


class BestModel:
    """A checkpoint of the best model so far. Set ``filepath`` before ``fit``.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as for Keras's ``ModelCheckpoint``.

    Raises:
        ValueError: ``filepath`` is not set when ``fit`` begins.
    """

    def __init__(self, **arguments: Any) -> None:
        ending = ".weights.h5" if arguments.get("save_weights_only") else ".keras"
        base: Any = super()
        base.__init__(filepath=f"best{ending}", save_best_only=True, **arguments)  # Keras checks the ending
        self.filepath: str | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ValueError(f"{type(self).__name__}: set its attribute `filepath` before training")
        base: Any = super()
        base.on_train_begin(logs)


class _TakesBackend:
    """The same callbacks for classes of other projects, which pass ``keras.backend`` as the first argument."""

    def __init__(self, backend: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backend = backend


class BroadcastGlobalVariablesCallbackImpl(_TakesBackend, BroadcastGlobalVariables):
    __doc__ = BroadcastGlobalVariables.__doc__


class MetricAverageCallbackImpl(_TakesBackend, MetricAverage):
    __doc__ = MetricAverage.__doc__


class LearningRateScheduleCallbackImpl(_TakesBackend, LearningRateSchedule):
    __doc__ = LearningRateSchedule.__doc__


class LearningRateWarmupCallbackImpl(_TakesBackend, LearningRateWarmup):
    __doc__ = LearningRateWarmup.__doc__
