"""NovoGrad for Keras 3, on every backend: Adam's first moment, and one second moment for each layer.

Source: B. Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep Networks
(arXiv:1905.11286, 2019), algorithm 1. For layer l with gradient g and weights w, in step t:

    v(t) = beta_2 * v(t-1) + (1 - beta_2) * |g|^2                  v(1) = |g|^2
    m(t) = beta_1 * m(t-1) + (g / (sqrt(v(t)) + epsilon) + d * w)      m(1) = g / (sqrt(v(1)) + epsilon) + d * w
    w(t+1) = w(t) - learning_rate * m(t)

|g| is the Euclidean norm, d the weight decay. A layer is one variable here, as in the authors' own programs.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable("horovod_examples")
class NovoGrad(keras.optimizers.Optimizer):
    """Works with large batches and without a long warm-up; needs half the memory of Adam.

    Args:
        learning_rate: a number or a schedule.
        beta_1, beta_2: the decay rates of the moments, from 0 to below 1.
        epsilon: keeps the division finite if a gradient is zero.
        weight_decay: d above; decoupled from the gradient's norm, and part of what momentum accumulates.
        grad_averaging: weigh the new term in m by 1 - beta_1, an option of the paper.
        others: as of every Keras optimizer.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        beta_1: float = 0.95,
        beta_2: float = 0.98,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
        name: str = "novograd",
        **arguments: Any,
    ) -> None:
        for label, value in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= value < 1:
                raise ValueError(f"{label} must be at least 0 and below 1, not {value}")
        super().__init__(learning_rate=learning_rate, name=name, **arguments)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.decay = weight_decay  # Keras would apply its own `weight_decay` to the weights at once
        self.grad_averaging = grad_averaging

    def build(self, variables: list[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self.first_moments = [self.add_variable_from_reference(variable, name="first_moment") for variable in variables]
        self.second_moments = [
            self.add_variable(shape=(), dtype=variable.dtype, name=f"second_moment_{number}")
            for number, variable in enumerate(variables)
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index = self._get_variable_index(variable)
        first, second = self.first_moments[index], self.second_moments[index]
        gradient = ops.cast(ops.convert_to_tensor(gradient), variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        begin = ops.equal(self.iterations, 0)

        square = ops.sum(ops.square(gradient))
        moment = ops.where(begin, square, self.beta_2 * ops.convert_to_tensor(second) + (1 - self.beta_2) * square)
        self.assign(second, moment)

        new = gradient / (ops.sqrt(moment) + self.epsilon) + self.decay * ops.convert_to_tensor(variable)
        if self.grad_averaging:
            new = (1 - self.beta_1) * new
        momentum = self.beta_1 * ops.convert_to_tensor(first) + new  # the first moment begins with zeros
        self.assign(first, momentum)
        self.assign_sub(variable, rate * momentum)

    def get_config(self) -> dict[str, Any]:
        own = ("beta_1", "beta_2", "epsilon", "grad_averaging")
        config = super().get_config()
        return {**config, **{name: getattr(self, name) for name in own}, "weight_decay": self.decay}
