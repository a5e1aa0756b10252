"""Loops of TensorFlow with a tape, eagerly and compiled: with a plain optimizer, and with a distributed one of Keras 3."""

from __future__ import annotations

from typing import Any

from loops.harness import Table

TABLE: Table[Any] = Table("TensorFlow")
STEPS = 3
CHANGED = r"the gradients of .* reached apply\(\) of the distributed optimizer .* changed since the backward pass"
ELSEWHERE = 1.0
"""The tolerance of loops that are wrong, and say so."""


@TABLE.loop()
def a_tape_and_a_clip_by_global_norm(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.sgd(momentum=0.9)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients = side.tape(tape).gradient(loss, model.variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    optimizer.build(model.variables)
    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def a_distributed_optimizer_and_a_plain_tape(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.wrap(side.adam())
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def a_distributed_optimizer_and_a_distributed_tape_with_a_clip(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.wrap(side.adam())
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients = [tf.clip_by_norm(each, 0.05) for each in side.tape(tape).gradient(loss, model.variables)]
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def reduced_for_a_clip_of_ones_own(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.wrap(side.adam(clipnorm=1.0))
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients = side.reduce(optimizer, tape.gradient(loss, model.variables), model.variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def reduced_for_a_clip_of_sums(side: Any) -> Any:
    tf, model = side.tf, side.Network()
    optimizer = side.wrap(side.sgd(), op=side.hvd.Sum)
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y) / (side.size if side.distributed else 1)
        gradients = side.reduce(optimizer, tape.gradient(loss, model.variables), model.variables)
        clipped = [tf.clip_by_value(each, -0.01, 0.01) for each in gradients]
        optimizer.apply_gradients(zip(clipped, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop(warns=CHANGED, tolerance=ELSEWHERE)
def a_clip_of_each_ranks_own_gradients(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.wrap(side.sgd())
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.variables), 0.1)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop(warns=CHANGED)
def added_up_by_hand_for_a_distributed_optimizer(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.wrap(side.adam())
    optimizer.build(model.variables)

    @side.step
    def step(batches: Any) -> None:
        total = [tf.zeros_like(each) for each in model.variables]
        for x, y in batches:
            with tf.GradientTape() as tape:
                loss = model.loss(x, y)
            total = [one + two / 2 for one, two in zip(total, tape.gradient(loss, model.variables), strict=True)]
        optimizer.apply_gradients(zip(total, model.variables, strict=True))

    for number in range(0, 2 * STEPS, 2):
        step([side.batch(number), side.batch(number + 1)])
    return model


@TABLE.loop()
def added_up_by_hand_and_reduced_once_for_a_clip(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.wrap(side.adam())
    optimizer.build(model.variables)
    totals = [tf.Variable(tf.zeros_like(each)) for each in model.variables]

    @side.step
    def micro(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        for total, gradient in zip(totals, tape.gradient(loss, model.variables), strict=True):
            total.assign_add(gradient)

    @side.step
    def step() -> None:
        gradients = side.reduce(optimizer, [each / 3 for each in totals], model.variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        for total in totals:
            total.assign(tf.zeros_like(total))

    for number in range(0, 3 * STEPS, 3):
        for part in range(3):
            micro(*side.batch(number + part))
        step()
    return model


@TABLE.loop()
def added_up_by_hand_from_distributed_tapes(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.sgd(momentum=0.9)
    optimizer.build(model.variables)

    @side.step
    def gradients_of(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        return side.tape(tape).gradient(loss, model.variables)

    for number in range(0, 2 * STEPS, 2):
        both = [gradients_of(*side.batch(number + part)) for part in range(2)]
        gradients, _ = tf.clip_by_global_norm([tf.add_n(each) for each in zip(*both, strict=True)], 0.2)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
    return model


@TABLE.loop()
def reduced_in_one_function_and_applied_in_another(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.wrap(side.sgd())
    optimizer.build(model.variables)

    @side.step
    def gradients_of(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        return side.tape(tape).gradient(loss, model.variables)

    for number in range(STEPS):
        gradients, _ = tf.clip_by_global_norm(gradients_of(*side.batch(number)), 0.1)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
    return model


def _gan(side: Any, penalty: bool) -> Any:
    """A generator and a judge with an optimizer each, as in TensorFlow's DCGAN tutorial; with a penalty, WGAN-GP."""
    tf = side.tf
    generator, judge = side.Network(1, outputs=6), side.Network(5, outputs=1)
    optimizers = [side.adam(0.01), side.adam(0.01)]
    for optimizer, model in zip(optimizers, (generator, judge), strict=True):
        optimizer.build(model.variables)

    @side.step
    def step(real: Any, noise: Any) -> None:
        with tf.GradientTape() as of_generator, tf.GradientTape() as of_judge:
            made = generator(noise)
            blame = -tf.reduce_mean(judge(made))
            loss = tf.reduce_mean(judge(made)) - tf.reduce_mean(judge(real))
            if penalty:
                with tf.GradientTape() as of_input:
                    between = (made + real) / 2
                    of_input.watch(between)
                    answer = judge(between)
                slopes = of_input.gradient(answer, between)
                loss += tf.reduce_mean((tf.norm(slopes, axis=1) - 1) ** 2)
        for tape, target, model, optimizer in (
            (of_generator, blame, generator, optimizers[0]),
            (of_judge, loss, judge, optimizers[1]),
        ):
            gradients = side.tape(tape).gradient(target, model.variables)
            optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    for number in range(STEPS):
        step(side.rows(number), side.rows(number + 100))
    return [*generator.variables, *judge.variables]


@TABLE.loop()
def a_gan(side: Any) -> Any:
    return _gan(side, penalty=False)


@TABLE.loop()
def a_gan_with_a_penalty_on_the_slope(side: Any) -> Any:
    return _gan(side, penalty=True)


@TABLE.loop()
def an_actor_and_a_critic_with_an_optimizer_each(side: Any) -> Any:
    tf = side.tf
    actor, critic = side.Network(1), side.Network(4, outputs=1)
    optimizers = side.wrap(side.adam()), side.wrap(side.sgd())
    optimizers[0].build(actor.variables)
    optimizers[1].build(critic.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            value = critic(x)[:, 0]
            target = tf.cast(y, tf.float64)
            advantage = tf.stop_gradient(target - value)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=actor(x))
            of_actor, of_critic = tf.reduce_mean(losses * advantage), tf.reduce_mean((target - value) ** 2)
        for loss, model, optimizer in ((of_actor, actor, optimizers[0]), (of_critic, critic, optimizers[1])):
            gradients = side.reduce(optimizer, tape.gradient(loss, model.variables), model.variables)
            gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
            optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return [*actor.variables, *critic.variables]


@TABLE.loop()
def two_losses_of_one_persistent_tape(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(heads=2), side.sgd()
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            losses = [model.loss(x, y, head) for head in range(2)]
        tape = side.tape(tape)
        for head, loss in enumerate(losses):
            variables = [*model.trunk.variables, *model.heads[head].variables]
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.05)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def a_penalty_on_the_reduced_gradients(side: Any) -> Any:
    """Of second order: the inner tape's reduced gradients are differentiated."""
    tf, model, optimizer = side.tf, side.Network(), side.sgd(0.05)
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = model.loss(x, y)
            slopes = side.tape(inner).gradient(loss, model.variables)
            total = loss + 0.1 * tf.add_n([tf.reduce_sum(each**2) for each in slopes])
        gradients = side.tape(outer).gradient(total, model.variables)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def a_hessian_times_a_vector(side: Any) -> Any:
    """AdaHessian's curvature: the slopes of reduced gradients along a fixed direction scale the step."""
    tf, model = side.tf, side.Network()

    @side.step
    def step(x: Any, y: Any) -> None:
        directions = [
            tf.where(tf.random.stateless_uniform(each.shape, [3, 4]) < 0.5, -1.0, 1.0) for each in model.variables
        ]
        directions = [tf.cast(each, tf.float64) for each in directions]
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = model.loss(x, y)
            slopes = side.tape(inner).gradient(loss, model.variables)
        curved = side.tape(outer).gradient(slopes, model.variables, output_gradients=directions)
        for variable, slope, curve, direction in zip(model.variables, slopes, curved, directions, strict=True):
            variable.assign_sub(0.1 * slope / (tf.abs(curve * direction) + 1.0))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop(refused="reduced with hvd.Min cannot be differentiated")
def slopes_of_the_smallest_gradients(side: Any) -> Any:
    tf, model = side.tf, side.Network()

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = model.loss(x, y)
            slopes = side.tape(inner, op=side.hvd.Min).gradient(loss, model.variables)
        for variable, slope in zip(model.variables, outer.gradient(slopes, model.variables), strict=True):
            variable.assign_sub(slope)

    step(*side.batch(0))
    return model


@TABLE.loop()
def sharpness_aware(side: Any) -> Any:
    """SAM: up along the gradient of the whole batch, the gradient there, and back."""
    tf, model, optimizer = side.tf, side.Network(), side.sgd(momentum=0.9)
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        first = side.tape(tape).gradient(loss, model.variables)
        scale = 0.05 / (tf.linalg.global_norm(first) + 1e-12)
        for variable, gradient in zip(model.variables, first, strict=True):
            variable.assign_add(scale * gradient)
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        second = side.tape(tape).gradient(loss, model.variables)
        for variable, gradient in zip(model.variables, first, strict=True):
            variable.assign_sub(scale * gradient)
        optimizer.apply_gradients(zip(second, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def meta_learning_over_the_tasks_of_all_ranks(side: Any) -> Any:
    """MAML: each rank adapts to a task of its own, without Horovod, and the outer gradients are averaged."""
    tf, model, optimizer = side.tf, side.Dense(6, 3, 1, "only"), side.adam()
    optimizer.build(model.variables)

    def of_task(weights: Any, x: Any, y: Any) -> Any:
        logits = x @ weights[0] + weights[1]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))

    @side.step
    def step(tasks: Any) -> None:
        with tf.GradientTape() as outer:
            losses = []
            for x, y in tasks:
                weights = [tf.identity(each) for each in model.variables]
                with tf.GradientTape() as inner:
                    inner.watch(weights)
                    loss = of_task(weights, x, y)
                weights = [one - 0.4 * two for one, two in zip(weights, inner.gradient(loss, weights), strict=True)]
                losses.append(of_task(weights, x, y))
            loss = tf.add_n(losses) / len(losses)
        gradients = side.tape(outer).gradient(loss, model.variables)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    for number in range(STEPS):
        x, y = side.batch(number)
        pairs = zip(tf.split(x, len(x) // 4), tf.split(y, len(y) // 4), strict=True)
        step(list(pairs))
    return model


@TABLE.loop()
def frozen_at_first(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.sgd(momentum=0.9)
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any, whole: bool) -> None:
        variables = model.variables if whole else model.heads[0].variables
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients, _ = tf.clip_by_global_norm(side.tape(tape).gradient(loss, variables), 0.1)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for number in range(4):
        step(*side.batch(number), whole=number >= 2)
    return model


@TABLE.loop()
def an_unused_variable_stays(side: Any) -> Any:
    """None on all ranks stays None: weight decay and momentum leave it alone."""
    tf, model = side.tf, side.Network(heads=2)
    optimizer = side.wrap(side.adam(weight_decay=0.1))
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def a_scaled_loss_whose_step_is_skipped_if_it_overflows(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.sgd()
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any, blow: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y) * 1024.0 * blow
        gradients = [each / 1024.0 for each in side.tape(tape).gradient(loss, model.variables)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in gradients])
        gradients = [tf.where(finite, each, tf.zeros_like(each)) for each in gradients]
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    for number in range(4):
        broken = number == 1 and (side.rank == 0 or not side.distributed)
        step(*side.batch(number), tf.constant(float("inf") if broken else 1.0, tf.float64))
    return model


@TABLE.loop()
def sums_with_a_smaller_rate(side: Any) -> Any:
    tf, model = side.tf, side.Network()
    optimizer = side.sgd(0.1 / (side.size if side.distributed else 1))
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients = side.tape(tape, op=side.hvd.Sum).gradient(loss, model.variables)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


def _embedding(side: Any, **options: Any) -> Any:
    tf, head = side.tf, side.Dense(5, 3, 2, "head")
    table = tf.Variable(tf.reshape(tf.cos(tf.range(40.0, dtype=tf.float64)), [8, 5]), name="table")
    variables, optimizer = [table, *head.variables], side.sgd()
    optimizer.build(variables)

    @side.step
    def step(words: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            logits = head(tf.nn.embedding_lookup(table, words))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        gradients = side.tape(tape, **options).gradient(loss, variables)
        if options:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for number in range(STEPS):
        _, y = side.batch(number)
        step((y * 3 + number) % 8, y)
    return variables


@TABLE.loop()
def an_embedding_with_sparse_gradients(side: Any) -> Any:
    return _embedding(side)


@TABLE.loop()
def an_embedding_made_dense_for_a_clip(side: Any) -> Any:
    """TensorFlow's norm of a sparse gradient counts a row as often as it occurs, on one process too."""
    tf = side.tf
    if not side.distributed:
        side.tape = lambda tape, **options: _Densely(tf, tape)
    return _embedding(side, sparse_as_dense=True)


class _Densely:
    def __init__(self, tf: Any, tape: Any) -> None:
        self._tf, self._tape = tf, tape

    def gradient(self, loss: Any, variables: Any) -> Any:
        return [self._tf.convert_to_tensor(each) for each in self._tape.gradient(loss, variables)]


@TABLE.loop()
def weights_averaged_by_hand(side: Any) -> Any:
    """Lookahead: every second step the slow weights go half of the way."""
    tf, model, optimizer = side.tf, side.Network(), side.adam()
    optimizer.build(model.variables)
    slow = [tf.Variable(each) for each in model.variables]

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        optimizer.apply_gradients(zip(side.tape(tape).gradient(loss, model.variables), model.variables, strict=True))

    for number in range(4):
        step(*side.batch(number))
        if number % 2:
            for own, fast in zip(slow, model.variables, strict=True):
                own.assign_add(0.5 * (fast - own))
                fast.assign(own)
    return model


@TABLE.loop()
def several_steps_in_one_call(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), side.wrap(side.adam())
    optimizer.build(model.variables)

    @side.step
    def steps(xs: Any, ys: Any) -> None:
        for number in tf.range(STEPS):
            with tf.GradientTape() as tape:
                loss = model.loss(xs[number], ys[number])
            optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))

    pairs = [side.batch(number) for number in range(STEPS)]
    steps(tf.stack([x for x, _ in pairs]), tf.stack([y for _, y in pairs]))
    return model


@TABLE.loop()
def clipped_layer_by_layer(side: Any) -> Any:
    """Adaptive clipping: the norm of a gradient is bounded by that of its weights."""
    tf, model, optimizer = side.tf, side.Network(), side.wrap(side.sgd())
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients = side.reduce(optimizer, tape.gradient(loss, model.variables), model.variables)
        bounds = [0.02 * tf.maximum(tf.norm(each), 1e-3) for each in model.variables]
        clipped = [tf.clip_by_norm(each, bound) for each, bound in zip(gradients, bounds, strict=True)]
        optimizer.apply_gradients(zip(clipped, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def losses_weighted_by_their_slopes(side: Any) -> Any:
    """Two tasks; each is weighted by the norm of its reduced gradient of the trunk."""
    tf, model, optimizer = side.tf, side.Network(heads=2), side.sgd()
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            losses = [model.loss(x, y, head) for head in range(2)]
        tape = side.tape(tape)
        every = [tape.gradient(loss, model.variables) for loss in losses]
        norms = [tf.norm(gradients[0]) for gradients in every]
        weights = [norm / tf.add_n(norms) for norm in norms]
        mixed = []
        for found in zip(*every, strict=True):
            parts = [weight * each for weight, each in zip(weights, found, strict=True) if each is not None]
            mixed.append(tf.add_n(parts))
        optimizer.apply_gradients(zip(mixed, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def a_plain_tape_for_the_input_beside_a_distributed_one(side: Any) -> Any:
    """Adversarial training: the attack is each row's own."""
    tf, model, optimizer = side.tf, side.Network(), side.adam()
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as of_input:
            of_input.watch(x)
            loss = model.loss(x, y)
        attacked = x + 0.1 * tf.sign(of_input.gradient(loss, x))
        with tf.GradientTape() as tape:
            loss = model.loss(attacked, y)
        optimizer.apply_gradients(zip(side.tape(tape).gradient(loss, model.variables), model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def gradients_reduced_by_hand(side: Any) -> Any:
    """A distributed optimizer knows what hvd.allreduce returns, and does not reduce it again; here with sums."""
    tf, model = side.tf, side.Network()
    optimizer = side.wrap(side.sgd(), op=side.hvd.Sum)
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients = tape.gradient(loss, model.variables)
        if side.distributed:
            gradients = [side.hvd.allreduce(each, name=f"by_hand_{i}") for i, each in enumerate(gradients)]
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


@TABLE.loop()
def one_optimizer_over_two_models_in_turns(side: Any) -> Any:
    """The optimizer is given the variables of one of the models in each step."""
    tf, models = side.tf, [side.Network(1), side.Network(7)]
    every = [each for model in models for each in model.variables]
    optimizer = side.wrap(side.adam())
    optimizer.build(every)

    @side.step
    def step(x: Any, y: Any, which: int) -> None:
        model = models[which]
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))

    for number in range(4):
        step(*side.batch(number), which=number % 2)
    return every


@TABLE.loop()
def a_contrastive_loss_over_gathered_features(side: Any) -> Any:
    """With the factor for the gradient of an allgather that its docstring has."""
    tf, model, optimizer = side.tf, side.Network(), side.sgd()
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            features = model(x)
            if side.distributed:
                gathered, size = side.hvd.allgather(features, name="features"), side.size
                features = size * gathered - tf.stop_gradient((size - 1) * gathered)
            alike = features @ tf.transpose(features)
            own = tf.range(len(alike))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=alike))
        optimizer.apply_gradients(zip(side.tape(tape).gradient(loss, model.variables), model.variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model
