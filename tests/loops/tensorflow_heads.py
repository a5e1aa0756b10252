"""Loops of TensorFlow in which ranks have gradients of different variables: heads of equal shapes, chosen on each rank."""

from __future__ import annotations

from typing import Any

from loops.harness import Table

EAGER: Table[Any] = Table("heads")
GRAPH: Table[Any] = Table("heads in graphs")
STEPS = 3
NO_GRADIENT = r"Mismatched requests: One rank has gradients .* of 6.* a graph cannot take zeros .* no gradient of head_"


def _trained(side: Any, head_of: Any, optimizer: Any, wrapped: bool, count: int = 2, **options: Any) -> Any:
    """Train a trunk and heads. In one process each rank's rows take the head that this rank chooses.

    Args:
        head_of: of the step and a rank, its head.
        wrapped: the optimizer is distributed. Otherwise the tape is.
    """
    tf, model = side.tf, side.Network(heads=count)
    optimizer.build(model.variables)

    def step(x: Any, y: Any, heads: tuple[int, ...]) -> None:
        with tf.GradientTape() as tape:
            xs, ys = tf.split(x, len(heads)), tf.split(y, len(heads))
            losses = [model.loss(*each, head) for *each, head in zip(xs, ys, heads, strict=True)]
            loss = tf.add_n(losses) / len(losses)
        tape = tape if wrapped else side.tape(tape)
        gradients = tape.gradient(loss, model.variables, **options)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    step = side.step(step)
    for number in range(STEPS):
        ranks = [side.rank] if side.distributed else range(side.size)
        step(*side.batch(number), heads=tuple(head_of(number, rank) for rank in ranks))
    return model


def each_its_own(step: int, rank: int) -> int:
    return rank % 2


def in_turns(step: int, rank: int) -> int:
    """All ranks the same, another in each step."""
    return step % 2


def drawn(step: int, rank: int) -> int:
    """Sometimes the same, sometimes not."""
    return [[0, 0, 1], [1, 2, 0], [2, 2, 2]][step][rank]


for _name, _head in {"each_its_own": each_its_own, "in_turns": in_turns}.items():
    for _kind in ("sgd", "adam"):
        for _wrapped in (False, True):

            def _loop(side: Any, head: Any = _head, kind: str = _kind, wrapped: bool = _wrapped) -> Any:
                optimizer = side.adam(weight_decay=0.01) if kind == "adam" else side.sgd(momentum=0.9)
                return _trained(side, head, side.wrap(optimizer) if wrapped else optimizer, wrapped)

            _called = f"{_name}_with_{_kind}_{'and_a_distributed_optimizer' if _wrapped else 'and_a_distributed_tape'}"
            EAGER.add(_called, _loop)
            GRAPH.add(_called, _loop, **({"refused": NO_GRADIENT} if _head is each_its_own else {}))


@EAGER.loop()
def drawn_heads(side: Any) -> Any:
    """What no rank has in a step stays as it is, momentum included."""
    return _trained(side, drawn, side.wrap(side.adam()), True, count=3)


@EAGER.loop()
def drawn_heads_and_a_tape(side: Any) -> Any:
    return _trained(side, drawn, side.adam(), False, count=3)


@GRAPH.loop()
def each_its_own_with_zeros_for_what_is_not_connected(side: Any) -> Any:
    zero = side.tf.UnconnectedGradients.ZERO
    return _trained(side, each_its_own, side.adam(), False, unconnected_gradients=zero)


def _only_one_head(side: Any) -> Any:
    """Each rank hands its optimizer the gradients of its own head's variables alone."""
    tf, model, optimizer = side.tf, side.Network(heads=2), side.wrap(side.sgd(momentum=0.9))
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        ranks = [side.rank] if side.distributed else range(side.size)
        with tf.GradientTape() as tape:
            xs, ys = tf.split(x, len(ranks)), tf.split(y, len(ranks))
            losses = [model.loss(*each, rank % 2) for *each, rank in zip(xs, ys, ranks, strict=True)]
            loss = tf.add_n(losses) / len(losses)
        heads = sorted({rank % 2 for rank in ranks})
        variables = [*model.trunk.variables, *(each for head in heads for each in model.heads[head].variables)]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


EAGER.add("only_the_variables_of_ones_own_head", _only_one_head)
GRAPH.add("only_the_variables_of_ones_own_head", _only_one_head, refused=NO_GRADIENT)


@EAGER.loop()
def a_rank_without_any_gradient(side: Any) -> Any:
    """The rows of the last rank are all padding; it has no loss at all."""
    tf, model, optimizer = side.tf, side.Network(), side.wrap(side.sgd())
    optimizer.build(model.variables)
    for number in range(STEPS):
        x, y = side.batch(number)
        if not side.distributed:
            x, y = x[:-4], y[:-4]
        with tf.GradientTape() as tape:
            loss = model.loss(x, y) * ((side.size - 1) / side.size if not side.distributed else 1.0)
            if side.distributed and side.rank == side.size - 1:
                loss = tf.zeros([], tf.float64)
        gradients = tape.gradient(loss, model.variables)
        if number == 1:
            gradients = side.reduce(optimizer, gradients, model.variables)
            gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
    return model


@EAGER.loop()
def rows_of_an_embedding_on_some_ranks_alone(side: Any) -> Any:
    """A rank that has no words has no sparse gradient of the table either."""
    tf, head = side.tf, side.Dense(5, 3, 2, "head")
    table = tf.Variable(tf.reshape(tf.cos(tf.range(40.0, dtype=tf.float64)), [8, 5]), name="table")
    variables, optimizer = [table, *head.variables], side.sgd()
    optimizer.build(variables)
    for number in range(STEPS):
        losses, ranks = [], [side.rank] if side.distributed else range(side.size)
        _, y = side.batch(number)
        with tf.GradientTape() as tape:
            for part, rank in zip(tf.split(y, len(ranks)), ranks, strict=True):
                rows = tf.nn.embedding_lookup(table, part) if rank else tf.ones([len(part), 5], tf.float64)
                losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=part, logits=head(rows)))
            loss = tf.reduce_mean(tf.concat(losses, 0))
        optimizer.apply_gradients(zip(side.tape(tape).gradient(loss, variables), variables, strict=True))
    return variables


def _another_tape(side: Any) -> Any:
    """Each rank asks its tape for the gradients of its own head's variables alone."""
    tf, model, optimizer = side.tf, side.Network(heads=2), side.sgd()
    optimizer.build(model.variables)
    if side.distributed:
        side.hvd.broadcast_variables(model.variables, root_rank=0)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y, side.rank % 2)
        variables = [*model.trunk.variables, *model.heads[side.rank % 2].variables]
        optimizer.apply_gradients(zip(side.tape(tape).gradient(loss, variables), variables, strict=True))

    for number in range(STEPS):
        step(*side.batch(number))
    return model


for _table in (EAGER, GRAPH):
    _table.add(
        "a_tape_over_the_variables_of_ones_own_head",
        _another_tape,
        refused=r"broadcast as numbers 0-3, but another rank has .* as numbers 0-1, 4-5\..* head_",
    )
