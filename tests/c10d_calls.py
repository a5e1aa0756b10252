"""Every form of every operation of a process group of PyTorch, called on two groups, and what each group answers.

The forms and the names of their arguments are those of the signatures that PyTorch's compiled class documents, so a version
that adds one is tested with it. Each form is called with its arguments by position, and by name. Further calls, of functions
and methods, pass what the signatures do not say: several tensors, empty ones, views, tensors twice, wrong arguments.

Run as a program, ``horovodrun -np 2 python tests/c10d_calls.py``, it prints what either group refuses or does otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Call = Callable[[Any], Any]
"""Makes a call on a group. Returns the tensors that it has written, in any nesting."""

_OPERATION = re.compile("all|broadcast|reduce|gather|scatter|barrier")
_WORDS = re.compile(r"RuntimeError: ProcessGroupGloo::\w+: ([^:(]+?)(?: at index| containing|:| \(|\.?$)")
_ROOT = 1


class Answer(NamedTuple):
    """What a group answered: the values of the tensors, or an error."""

    values: Any = None
    error: str = ""


class Row(NamedTuple):
    """One call on both groups.

    Attributes:
        right: the answer that is right: Gloo's, to the same call or, for tensors that are not contiguous, to that with copies.
    """

    call: str
    own: Answer
    gloo: Answer
    right: Answer

    def fails(self) -> bool:
        """Whether Gloo gives a result, and ours is not the same."""
        return not self.right.error and (bool(self.own.error) or self.own.values != self.right.values)

    def lacks(self) -> bool:
        """Whether Gloo raises an error or gives another result where ours is right."""
        return not self.own.error and self.gloo != self.own

    def words(self) -> str:
        """What Gloo says of wrong arguments, without its name for the operation and without numbers; "" if it does not."""
        found = _WORDS.match(self.gloo.error)
        return found[1] if found else ""


def _tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32) + 10 * dist.get_rank()


def _options(kind: str, **values: Any) -> Any:
    made = getattr(dist.distributed_c10d, kind)()
    for name, value in values.items():
        setattr(made, name, value)
    return made


class Form(NamedTuple):
    """One of the signatures of a method: the names and the types of its arguments, and how many have no default."""

    method: str
    names: list[str]
    types: list[str]
    needed: int

    def call(self, group: Any, count: int, by_name: bool = False) -> Any:
        """Call the method with its first ``count`` arguments. Returns the tensors that it has written."""
        rank, names, types = dist.get_rank(), self.names[:count], self.types[:count]
        root = _ROOT if {"opts", "root"} & set(names) else 0
        values = [self._value(name, kind, root) for name, kind in zip(names, types, strict=True)]
        call = getattr(group, self.method)
        work = call(**dict(zip(names, values, strict=True))) if by_name else call(*values)
        if work is not None:
            work.wait()
        if self.method == "reduce" and rank != root:
            return []
        return [value for name, value in zip(names, values, strict=True) if name.startswith(("output", "tensor"))]

    def _value(self, name: str, kind: str, root: int) -> Any:
        if name == "opts":
            made = _options(kind.rsplit(".", 1)[-1])
            if hasattr(made, "rootRank"):
                made.rootRank = root
            return made
        others = {
            "timeout": timedelta(seconds=30),
            "op": dist.ReduceOp.MAX,
            "root": root,
            "output_split_sizes": [],
            "input_split_sizes": [],
            "wait_all_ranks": False,
        }
        return others[name] if name in others else self._tensors(name, kind, root)

    def _tensors(self, name: str, kind: str, root: int) -> Any:
        """A tensor of two elements, or one for each rank: as one tensor, or as a list."""
        method, size, output = self.method, dist.get_world_size(), name.startswith("output")
        whole = re.search("single|base|tensor_coalesced", method)
        exchanges = re.search("to_?all", method)
        value: Any = _tensor(1, 2)
        depth = 0
        if exchanges or ("gather" in method and output) or ("scatter" in method and not output):
            value = _tensor(*range(2 * size)) if whole else [_tensor(number, 3) for number in range(size)]
            depth = 0 if whole else 1
            if method in ("gather", "scatter") and dist.get_rank() != root:
                return []
            if method == "allgather_coalesced":
                return [[each] for each in value]
        for _ in range(kind.count("Sequence") - depth):
            value = [value]
        return value


def forms(method: str) -> Iterator[Form]:
    """The signatures of a method, as PyTorch's compiled class documents them."""
    documented = getattr(dist.ProcessGroup, method).__doc__ or ""
    for found in re.finditer(rf"{method}\(self: [\w.]+(?:, (.*))?\) -> (?:c10d::Work|None)", documented):
        parts = re.split(r", (?=\w+: )", found[1]) if found[1] else []
        pairs = [part.split(" = ", 1)[0].split(": ", 1) for part in parts]
        needed = sum(" = " not in part for part in parts)
        yield Form(method, [name for name, _ in pairs], [kind for _, kind in pairs], needed)


def documented_calls() -> Iterator[tuple[str, Call]]:
    """Each form of each operation: with what it needs alone, with everything by position, with everything by name."""
    for method in sorted(vars(dist.ProcessGroup)):
        for form in forms(method) if _OPERATION.search(method) else ():
            count = len(form.names)
            shown = [f"{name}=" for name in form.names]
            yield f"{method}({', '.join(form.names[: form.needed])})", partial(form.call, count=form.needed)
            if count > form.needed:
                yield f"{method}({', '.join(form.names)})", partial(form.call, count=count)
            if count:
                yield f"{method}({', '.join(shown)})", partial(form.call, count=count, by_name=True)


def _waited(work: Any, *written: Any) -> Any:
    if work is not None:
        work.wait()
    return written


def further_calls() -> Iterator[tuple[str, Call]]:
    """Calls with several tensors, empty ones, views, tensors twice, and arguments that are wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    t = _tensor

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape)

    def listed(*counts: int) -> list[torch.Tensor]:
        return [t(*range(count)) for count in counts]

    def strided(*values: float) -> torch.Tensor:
        return torch.zeros(len(values), 3)[:, 1].copy_(t(*values))

    def method(name: str, make: Callable[[], Any], *options: Any) -> Call:
        """A call of a method of the group with what ``make`` returns, which is also what it writes."""

        def call(group: Any) -> Any:
            values = make()
            return _waited(getattr(group, name)(*values, *options), values)

        return call

    def root(kind: str, number: int, **others: Any) -> Any:
        return _options(f"{kind}Options", rootRank=number, **others)

    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        several = _options("AllreduceOptions", reduceOp=getattr(dist.ReduceOp, op))
        yield f"allreduce of several, {op}", method("allreduce", lambda: [listed(2, 2, 2)], several)
    same = t(1, 2)
    yield "allreduce, one tensor twice", method("allreduce", lambda: [[(each := same.clone()), each]])
    yield (
        "allreduce_coalesced, one tensor twice",
        method("allreduce_coalesced", lambda: [[(each := same.clone()), each]]),
    )
    yield (
        "allreduce_coalesced, overlapping",
        method("allreduce_coalesced", lambda: [[(each := t(1, 2, 3, 4))[:3], each[3:]]]),
    )
    yield "allreduce of several, other sizes", method("allreduce", lambda: [listed(2, 3)])
    yield "allreduce of several, other types", method("allreduce", lambda: [[t(1), t(1).double()]])
    yield "allreduce of several, other layouts", method("allreduce", lambda: [[t(1), t(1).to_sparse()]])
    yield "broadcast of several", method("broadcast", lambda: [listed(2, 2)], root("Broadcast", 1, rootTensor=1))
    yield "broadcast, root tensor 3", method("broadcast", lambda: [listed(2, 2)], root("Broadcast", 1, rootTensor=3))
    yield (
        "allgather of several",
        method("allgather", lambda: [[[zeros(2) for _ in range(2 * size)] for _ in range(2)], listed(2, 2)]),
    )
    yield "allgather, one output for all", method("allgather", lambda: [[[zeros(2)] * size], [t(1, 2)]])
    yield (
        "allgather_coalesced",
        method(
            "allgather_coalesced",
            lambda: [
                [[zeros(2), zeros(1), zeros(2, 2)] for _ in range(size)],
                [*listed(2, 1), t(1, 2, 3, 4).view(2, 2)],
            ],
        ),
    )

    def summed(op: str, *others: float) -> Call:
        """An allreduce of one or several sparse tensors, of which no two ranks have the same elements."""

        def call(group: Any) -> Any:
            indices = [[rank, size]]
            tensors = [
                torch.sparse_coo_tensor(indices, [1.0, each], (size + 1,), check_invariants=False)
                for each in (2.0, *others)
            ]
            _waited(group.allreduce(tensors, _options("AllreduceOptions", reduceOp=getattr(dist.ReduceOp, op))))
            return [each.to_dense() for each in tensors]

        return call

    yield "allreduce, sparse", summed("SUM")
    yield "allreduce of several, sparse", summed("SUM", 3.0, 4.0)
    yield "allreduce, sparse, MAX", summed("MAX")

    def rooms(lists: int, length: int) -> list[list[torch.Tensor]]:
        return [[strided(0, 0) for _ in range(length)] for _ in range(lists)]

    def value(name: str, outputs: Callable[[], Any], inputs: Callable[[], Any], inference: bool = False) -> Call:
        """The value of the future of a call, which another thread may complete."""

        def call(group: Any) -> Any:
            with torch.inference_mode(inference):
                future = getattr(group, name)(outputs(), inputs()).get_future()
                future.wait()
                return future.value()

        return call

    for count in (1, 2):
        inputs = partial(listed, *[2] * count)
        several, coalesced = partial(rooms, count, count * size), partial(rooms, size, count)
        for mode in (False, True):
            yield (
                f"allgather of {count}, value of the future, inference {mode}",
                value("allgather", several, inputs, mode),
            )
            yield (
                f"allgather_coalesced of {count}, value of the future, inference {mode}",
                value("allgather_coalesced", coalesced, inputs, mode),
            )
    yield "allgather, too few outputs", method("allgather", lambda: [[[zeros(2)]], [t(1, 2)]])
    yield "allgather, more outputs than inputs", method("allgather", lambda: [[[zeros(2)] * size] * 2, [t(1, 2)]])
    yield "allgather, other size", method("allgather", lambda: [[[zeros(3) for _ in range(size)]], [t(1, 2)]])
    yield "allgather, other type", method("allgather", lambda: [[[zeros(2).double() for _ in range(size)]], [t(1, 2)]])
    yield "allgather_coalesced, too few lists", method("allgather_coalesced", lambda: [[[zeros(2)]], [t(1, 2)]])
    yield (
        "allgather_coalesced, too few outputs",
        method("allgather_coalesced", lambda: [[[zeros(2)]] * size, listed(2, 1)]),
    )
    yield (
        "allgather_into_tensor_coalesced of two",
        method("allgather_into_tensor_coalesced", lambda: [[zeros(2 * size), zeros(size)], listed(2, 1)]),
    )
    yield (
        "reduce_scatter_tensor_coalesced of two",
        method("reduce_scatter_tensor_coalesced", lambda: [[zeros(2), zeros(1)], listed(2 * size, size)]),
    )

    for number in (-1, size, 5):
        yield f"broadcast from {number}", method("broadcast", lambda: [[t(1)]], root("Broadcast", number))
        yield f"reduce to {number}", method("reduce", lambda: [[t(1)]], root("Reduce", number))
        yield f"gather to {number}", method("gather", lambda: [[], [t(1)]], root("Gather", number))
        yield f"scatter from {number}", method("scatter", lambda: [[t(1)], []], root("Scatter", number))
    yield "reduce, root tensor 1", method("reduce", lambda: [[t(1)]], root("Reduce", 0, rootTensor=1))
    yield "gather, other size", method("gather", lambda: [[[zeros(2)] * size], [t(1)]], root("Gather", rank))
    yield "gather, too many", method("gather", lambda: [[[zeros(1)] * (size + 1)], [t(1)]], root("Gather", rank))
    yield "scatter, other size", method("scatter", lambda: [[t(1)], [[zeros(2)] * size]], root("Scatter", rank))
    yield "scatter, too few", method("scatter", lambda: [[t(1)], [[zeros(1)] * (size - 1)]], root("Scatter", rank))
    yield "reduce of several", method("reduce", lambda: [listed(2, 2)], root("Reduce", 0))
    yield (
        "gather of several",
        method("gather", lambda: [[[zeros(2)] * size] * 2 if rank == 0 else [], listed(2, 2)], root("Gather", 0)),
    )
    yield "gather without outputs", method("gather", lambda: [[], [t(1)]], root("Gather", rank))
    yield (
        "gather with outputs elsewhere",
        method("gather", lambda: [[[zeros(1)] * size], [t(1)]], root("Gather", (rank + 1) % size)),
    )
    yield (
        "scatter of several",
        method("scatter", lambda: [listed(1, 1), [[zeros(1)] * size] * 2 if rank == 0 else []], root("Scatter", 0)),
    )
    yield "scatter without inputs", method("scatter", lambda: [[t(1)], []], root("Scatter", rank))
    yield (
        "scatter with inputs elsewhere",
        method("scatter", lambda: [[t(1)], [[zeros(1)] * size]], root("Scatter", (rank + 1) % size)),
    )
    yield "reduce_scatter of several", method("reduce_scatter", lambda: [[zeros(2)] * 2, [listed(*[2] * size)] * 2])
    yield "reduce_scatter, too few inputs", method("reduce_scatter", lambda: [[zeros(2)], [[t(1, 2)]]])
    for name in ("allreduce", "allreduce_coalesced", "broadcast", "reduce"):
        yield f"{name} of no tensor", method(name, lambda: [[]])
    for name in ("allgather", "allgather_coalesced", "gather", "scatter", "reduce_scatter", "alltoall"):
        yield f"{name} of no tensor", method(name, lambda: [[], []])
    yield "send of several", method("send", lambda: [listed(1, 1)], (rank + 1) % size, 0)
    yield "send of no tensor", method("send", lambda: [[]], (rank + 1) % size, 0)

    def one_of_many(value: float) -> torch.Tensor:
        return torch.zeros(4)[1:2:3].copy_(t(value))

    views: dict[str, Callable[[], torch.Tensor]] = {
        "one element with a stride": lambda: one_of_many(3),
        "one element of a transposed matrix": lambda: (torch.zeros(4, 4).t()[1:2, 1:2]).copy_(t(4)),
        "a number": lambda: t(5).squeeze(0),
        "no elements": lambda: zeros(0, 3),
        "every third element": lambda: strided(1, 2),
        "a transposed matrix": lambda: t(1, 2, 3, 4, 5, 6).view(2, 3).t(),
    }
    for kind, view in views.items():

        def everything(group: Any, view: Callable[[], torch.Tensor] = view, copied: bool = False) -> Any:
            summed, sent, reduced, mine = [view().contiguous() if copied else view() for _ in range(4)]
            _waited(group.allreduce([summed]))
            _waited(group.broadcast(sent, 1))
            _waited(group.reduce(reduced, 0))
            outputs = [torch.zeros(mine.shape) for _ in range(size)]
            _waited(group.allgather([outputs], [mine]))
            return [summed, sent, reduced if rank == 0 else None, outputs]

        def messages(group: Any, view: Callable[[], torch.Tensor] = view, copied: bool = False) -> Any:
            received, given = torch.zeros_like(view()), view()
            if copied:
                received, given = received.contiguous(), given.contiguous()
            sent = dist.isend(given, (rank + 1) % size, group=group)
            dist.recv(received, (rank - 1) % size, group=group)
            _waited(sent)
            return [received]

        yield f"collectives of {kind}", everything
        yield f"send, recv of {kind}", messages

    def exchanged(splits: Callable[[int, int], int], empty: tuple[int, ...]) -> Call:
        """An alltoall in which rank s sends ``splits(s, r)`` rows to rank r. A tensor without rows has the shape ``empty``."""

        def call(group: Any) -> Any:
            sent = [splits(rank, of) for of in range(size)]
            received = [splits(of, rank) for of in range(size)]
            source = t(*range(2 * sum(sent))).view(-1, 2) if sum(sent) else zeros(*empty)
            target = zeros(sum(received), 2) if sum(received) else zeros(*empty)
            dist.all_to_all_single(target, source, received, sent, group=group)
            return [target]

        return call

    for empty in ((0,), (0, 2), (0, 2, 2)):
        yield f"all_to_all_single, rank 0 sends nothing, {empty}", exchanged(lambda s, r: s * (r + 1), empty)
        yield f"all_to_all_single, rank 1 gets nothing, {empty}", exchanged(lambda s, r: 0 if r == 1 else s + 1, empty)
        yield f"all_to_all_single, nobody sends, {empty}", exchanged(lambda s, r: 0, empty)
    yield (
        "all_to_all_single, wrong number of splits",
        lambda group: dist.all_to_all_single(t(1, 2), t(1, 2), [2], [2], group=group),
    )
    yield (
        "all_to_all_single, splits of other rows",
        lambda group: dist.all_to_all_single(zeros(size), zeros(size), [1] * size, [2] * size, group=group),
    )


def _plain(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return [str(values.dtype), list(values.shape), values.tolist()]
    return [_plain(each) for each in values] if isinstance(values, list | tuple) else values


def _answer(call: Call, group: Any) -> Answer:
    try:
        return Answer(_plain(call(group)))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return Answer(error=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def table(own: Any, gloo: Any) -> list[Row]:
    """Runs on every rank: every call on both groups."""
    rows = []
    for calls in (documented_calls(), further_calls()):
        for name, call in calls:
            first, second = _answer(call, own), _answer(call, gloo)
            with_copies = " of every" in name or " of a" in name
            rows.append(Row(name, first, second, _answer(partial(call, copied=True), gloo) if with_copies else second))
    return rows


def main() -> None:
    dist.init_process_group("horovod")
    rows = table(dist.group.WORLD, dist.new_group(backend="gloo"))
    if dist.get_rank() == 0:
        print(f"{len(rows)} calls; PyTorch {torch.__version__}", "| call | Gloo | horovod |", "|---|---|---|", sep="\n")
        for row in rows:
            if row.own.error or row.fails() or row.lacks():
                print(f"| {row.call} | {row.gloo.error or row.gloo.values} | {row.own.error or row.own.values} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
