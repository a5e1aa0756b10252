"""Whatever a script passes, it works or is an error of that call: a table of odd values for every argument of every function.

Both ranks pass the same value, and after each call a collective must succeed. Then one rank alone passes it, and where that is
an error makes the call again as the other rank does. A binding is one line in :data:`BINDINGS`.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

from jobs import make_job
from ranks import RankPool


class Binding(NamedTuple):
    """How to call one.

    Attributes:
        framework: the name of its module below ``horovod``.
        tensor: makes a tensor of four ones.
        others: more odd values: what the framework has for numbers.
    """

    framework: str
    tensor: Callable[[], Any]
    others: Callable[[], dict[str, Any]]


def torch_values() -> dict[str, Any]:
    import torch

    return {
        "tensor of an int": torch.tensor(1),
        "tensor of a float": torch.tensor(0.5),
        "tensor of a bool": torch.tensor(True),
        "tensor of a complex number": torch.tensor(1j),
        "tensor that requires a gradient": torch.tensor(0.5, requires_grad=True),
        "tensor of several": torch.tensor([2, 2]),
        "tensor of several 32-bit integers": torch.tensor([2, 2], dtype=torch.int32),
        "data type": torch.float32,
        "sparse tensor": torch.eye(2).to_sparse(),
        "tensor of nothing": torch.ones(0),
        "tensors": [torch.ones(2), torch.ones(3)],
        "pairs": [("x", torch.ones(2))],
        "tensors by name": {"x": torch.ones(2)},
        "tensors by odd names": {5: torch.ones(2), "\udc80": torch.ones(1)},
    }


def torch_tensor() -> Any:
    import torch

    return torch.ones(4)


BINDINGS = {
    "torch": Binding("torch", torch_tensor, torch_values),
}


class Whole(int):
    pass


class Real(float):
    pass


class Text(str):
    pass


class Number(enum.IntEnum):
    ONE = 1


class Word(str, enum.Enum):
    ONE = "one"


class Broken:
    """Fails whatever it is asked."""

    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __float__(self) -> float:
        raise RuntimeError("no float")


def odd_values() -> dict[str, Any]:
    return {
        "none": None,
        "true": True,
        "false": False,
        "int of NumPy": np.int64(1),
        "small int of NumPy": np.uint8(0),
        "float of NumPy": np.float32(0.5),
        "double of NumPy": np.float64(1),
        "bool of NumPy": np.bool_(True),
        "complex of NumPy": np.complex64(1),
        "text of NumPy": np.str_("x"),
        "array without dimensions": np.array(1),
        "array of one": np.array([1]),
        "array of two": np.array([2, 2]),
        "array of floats": np.array([2.0, 2.0]),
        "array of two dimensions": np.ones((2, 2), np.int64),
        "array of texts": np.array(["a", "b"]),
        "array of nothing": np.array([], np.int64),
        "int of a subclass": Whole(1),
        "float of a subclass": Real(0.5),
        "text of a subclass": Text("x"),
        "number of an enumeration": Number.ONE,
        "word of an enumeration": Word.ONE,
        "one": 1,
        "minus one": -1,
        "many": 12345,
        "63 bits": 2**63 - 1,
        "64 bits": 2**63,
        "negative 64 bits": -(2**63),
        "65 bits": 2**64,
        "very many": 10**400,
        "more digits than Python writes": 10**5000,
        "a whole float": 1.0,
        "a half": 0.5,
        "zero": 0.0,
        "tiny": 5e-324,
        "huge": 1e308,
        "infinity": float("inf"),
        "minus infinity": float("-inf"),
        "not a number": float("nan"),
        "a complex number": 1j,
        "a decimal": Decimal("0.5"),
        "a decimal that is none": Decimal("nan"),
        "a fraction": Fraction(1, 2),
        "no text": "",
        "text": "text",
        "digits": "1",
        "umlauts": "grüße/日本",
        "a zero byte": "a\0b",
        "a surrogate": "a\udc80",
        "half a pair": "\ud800",
        "long text": "x" * 60_000,
        "too long a text": "x" * (1 << 20),
        "bytes": b"text",
        "bytearray": bytearray(b"\1\1"),
        "empty list": [],
        "list": [2, 2],
        "list of NumPy": [np.int32(2), np.int8(2)],
        "list of floats": [2.0, 2.0],
        "list of texts": ["2", "2"],
        "list of bools": [True, True],
        "list of much": [2**70, -(2**70)],
        "list of lists": [[2], [2]],
        "list of none": [None],
        "tuple": (0, 1),
        "set": {0, 1},
        "dictionary": {"a": 1},
        "range": range(2),
        "iterator": iter([2, 2]),
        "an object": object(),
        "a class": dict,
        "a function": len,
        "broken": Broken(),
    }


Call = Callable[[Any], Any]


def calls(hvd: Any, tensor: Callable[[], Any]) -> dict[str, tuple[Call, Any, bool]]:
    """By function and argument: the call, a value that works, and whether one rank alone may pass another."""

    def finished(handle: Any) -> Any:
        return hvd.synchronize(handle)

    every: dict[str, Call] = {
        "allreduce": lambda a: hvd.allreduce(tensor(), **a),
        "allgather": lambda a: hvd.allgather(tensor(), **a),
        "broadcast": lambda a: hvd.broadcast(tensor(), **{"root_rank": 0, **a}),
        "alltoall": lambda a: hvd.alltoall(tensor(), **a),
        "reducescatter": lambda a: hvd.reducescatter(tensor(), **a),
        "grouped_allreduce": lambda a: hvd.grouped_allreduce([tensor(), tensor()], **a),
        "grouped_allgather": lambda a: hvd.grouped_allgather([tensor(), tensor()], **a),
        "grouped_reducescatter": lambda a: hvd.grouped_reducescatter([tensor(), tensor()], **a),
        "allreduce_": lambda a: hvd.allreduce_(tensor(), **a),
        "broadcast_": lambda a: hvd.broadcast_(tensor(), **{"root_rank": 0, **a}),
        "allreduce_async": lambda a: finished(hvd.allreduce_async(tensor(), **a)),
        "allreduce_async_": lambda a: finished(hvd.allreduce_async_(tensor(), **a)),
        "broadcast_async": lambda a: finished(hvd.broadcast_async(tensor(), **{"root_rank": 0, **a})),
        "alltoall_async": lambda a: finished(hvd.alltoall_async(tensor(), **a)),
        "reducescatter_async": lambda a: finished(hvd.reducescatter_async(tensor(), **a)),
        "broadcast_object": lambda a: hvd.broadcast_object("object", **a),
        "allgather_object": lambda a: hvd.allgather_object("object", **a),
        "barrier": lambda a: hvd.barrier(**a),
    }
    whole = hvd.global_process_set
    reducing: dict[str, Any] = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 2.0}
    arguments: dict[str, dict[str, Any]] = {
        "allreduce": {**reducing, "average": True},
        "grouped_allreduce": {**reducing, "average": None},
        "allreduce_": reducing,
        "allreduce_async": reducing,
        "allreduce_async_": reducing,
        "reducescatter": reducing,
        "reducescatter_async": reducing,
        "grouped_reducescatter": reducing,
        "broadcast": {"root_rank": 1},
        "broadcast_": {"root_rank": 1},
        "broadcast_async": {"root_rank": 1},
        "broadcast_object": {"root_rank": 1},
        "alltoall": {"splits": [2, 2]},
        "alltoall_async": {"splits": [2, 2]},
    }
    found: dict[str, tuple[Call, Any, bool]] = {}
    for name, call in every.items():
        if not hasattr(hvd, name):
            continue
        for argument, valid in arguments.get(name, {}).items():
            found[f"{name}({argument}=)"] = (lambda odd, c=call, a=argument: c({a: odd}), valid, True)
            # Under a name, what was found out about a tensor is remembered.
            found[f"{name}({argument}=, name=)"] = (
                lambda odd, c=call, a=argument: c({a: odd, "name": "given"}),
                valid,
                True,
            )
        if name != "barrier":
            found[f"{name}(name=)"] = (lambda odd, c=call: c({"name": odd}), "given", False)
        if name != "allgather_object" or hvd.__name__ != "horovod.tensorflow":
            found[f"{name}(process_set=)"] = (lambda odd, c=call: c({"process_set": odd}), whole, True)
    for name in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "allreduce_", "broadcast_"):
        root = {"root_rank": 0} if "broadcast" in name else {}
        if hasattr(hvd, name):
            found[f"{name}(tensor)"] = (lambda odd, n=name, r=root: getattr(hvd, n)(odd, **r), tensor(), False)
    for name in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter", "grouped_allreduce_"):
        if hasattr(hvd, name):
            found[f"{name}(tensors)"] = (lambda odd, n=name: getattr(hvd, n)(odd), [tensor()], False)
            found[f"{name}(tensor in tensors)"] = (lambda odd, n=name: getattr(hvd, n)([odd]), tensor(), False)
    if hasattr(hvd, "allreduce"):
        found["allreduce(compression=)"] = (
            lambda odd: hvd.allreduce(tensor(), compression=odd),
            hvd.Compression.none,
            True,
        )
    if hasattr(hvd, "broadcast_parameters"):
        found["broadcast_parameters(params)"] = (lambda odd: hvd.broadcast_parameters(odd, 0), [tensor()], False)
        found["broadcast_parameters(root_rank=)"] = (lambda odd: hvd.broadcast_parameters([tensor()], odd), 0, False)
    if hasattr(hvd, "synchronize"):
        found["synchronize(handle)"] = (lambda odd: hvd.synchronize(odd), 1, True)
        found["poll(handle)"] = (lambda odd: hvd.poll(odd), 10**6, False)
    found["ProcessSet"] = (lambda odd: hvd.ProcessSet(odd), [0], True)
    found["add_process_set"] = (lambda odd: hvd.remove_process_set(hvd.add_process_set(odd)), [1], False)
    found["remove_process_set"] = (lambda odd: hvd.remove_process_set(odd), whole, True)
    found["start_timeline(mark_cycles=)"] = (lambda odd: hvd.start_timeline("/dev/null", odd), False, True)
    found["init(comm=), running"] = (lambda odd: hvd.init(comm=odd), None, True)
    found["init(process_sets=), running"] = (lambda odd: hvd.init(process_sets=odd), None, True)
    if hasattr(hvd, "join"):
        found["join"] = (lambda odd: hvd.join(odd), -1, True)
    return found


def attempt(call: Call, value: Any) -> str:
    """What came of it: "" if it worked, "refused", "failed" on all ranks; or what must not be, as text."""
    from horovod.core.errors import HorovodInternalError

    try:
        call(value)
    except (TypeError, ValueError, NotImplementedError, KeyError):
        return "refused"
    except HorovodInternalError:
        return "failed"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def job_of(binding: str, ranks: Callable[..., RankPool]) -> Callable[..., list[Any]]:
    pytest.importorskip(binding)
    return make_job(lambda size: ranks(size, framework=BINDINGS[binding].framework), f"horovod.{binding}")


DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_TIMELINE": "DYNAMIC"}


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("alone", [False, True], ids=["on all ranks", "on one rank"])
@pytest.mark.filterwarnings("ignore")
def test_an_odd_argument_works_or_is_an_error_of_that_call(
    ranks: Callable[..., RankPool], binding: str, alone: bool
) -> None:
    def check() -> list[str]:
        import warnings

        warnings.simplefilter("ignore")
        hvd = importlib.import_module(f"horovod.{binding}")
        known = BINDINGS[binding]
        bad = []
        for what, (call, valid, may_differ) in calls(hvd, known.tensor).items():
            if alone and not may_differ:
                continue
            for kind, value in {**odd_values(), **known.others()}.items():  # new ones: an iterator serves once
                came = attempt(call, valid if alone and hvd.rank() == 0 else value)
                if came == "refused" and alone and hvd.rank() == 1:
                    attempt(call, valid)
                elif came not in ("", "refused", "failed"):
                    bad.append(f"{what} {kind}: {came}")
                try:
                    hvd.allreduce(known.tensor(), name="afterwards")
                except Exception as error:
                    return [*bad, f"after {what} {kind}: {type(error).__name__}: {error}"[:2000]]
        return bad

    for bad in job_of(binding, ranks)(2, check, env=DYNAMIC, timeout=240):
        assert not bad, "\n".join(bad)


@pytest.mark.parametrize("binding", BINDINGS)
def test_an_odd_argument_of_init(ranks: Callable[..., RankPool], binding: str) -> None:
    def check() -> list[str]:
        hvd = importlib.import_module(f"horovod.{binding}")
        bad = []
        for argument in ("comm", "process_sets"):
            for kind, value in odd_values().items():
                hvd.shutdown()
                came = attempt(lambda odd, argument=argument: hvd.init(**{argument: odd}), value)
                if came not in ("", "refused"):
                    bad.append(f"init({argument}=) {kind}: {came}")
                hvd.shutdown()
                hvd.init()
                if hvd.size() != 2:
                    return [*bad, f"after init({argument}=) {kind}: {hvd.size()} ranks"]
                hvd.allreduce(BINDINGS[binding].tensor(), name="afterwards")
        return bad

    for bad in job_of(binding, ranks)(2, check, timeout=240):
        assert not bad, "\n".join(bad)


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_timeline_in_an_odd_place(ranks: Callable[..., RankPool], binding: str, tmp_path: Any) -> None:
    def check(folder: str) -> list[str]:
        import os
        from pathlib import Path

        hvd = importlib.import_module(f"horovod.{binding}")
        os.chdir(folder)
        try:
            bad = []
            for kind, value in odd_values().items():
                came = attempt(hvd.start_timeline, value)
                if came not in ("", "refused"):
                    bad.append(f"{kind}: {came}")
                hvd.allreduce(BINDINGS[binding].tensor(), name="recorded")
                hvd.stop_timeline()
            hvd.start_timeline(Path(folder) / "path.json")
            hvd.allreduce(BINDINGS[binding].tensor(), name="recorded")
            hvd.stop_timeline()
            if hvd.rank() == 0 and not (Path(folder) / "path.json").exists():
                bad.append("a path gave no file")
            return bad
        finally:
            os.chdir("/")

    for bad in job_of(binding, ranks)(2, check, str(tmp_path), env=DYNAMIC):
        assert not bad, "\n".join(bad)


@pytest.mark.parametrize("binding", BINDINGS)
def test_numbers_of_other_kinds_mean_what_they_say(ranks: Callable[..., RankPool], binding: str) -> None:
    def check() -> None:
        hvd = importlib.import_module(f"horovod.{binding}")
        known = BINDINGS[binding]

        def of_rank() -> Any:
            return known.tensor() * (hvd.rank() + 1)

        def numbers(result: Any) -> list[float]:
            return np.asarray(result).tolist()

        values = {**odd_values(), **known.others()}
        for one in (
            "int of NumPy",
            "array without dimensions",
            "int of a subclass",
            "number of an enumeration",
            "tensor of an int",
        ):
            if one in values:
                assert numbers(hvd.broadcast(of_rank(), root_rank=values[one])) == [2.0] * 4, one
                assert numbers(hvd.allreduce(of_rank(), op=values[one])) == [3.0] * 4, one
                assert hvd.broadcast_object(hvd.rank(), root_rank=values[one]) == 1, one
        for half in ("float of NumPy", "float of a subclass", "a decimal", "a fraction", "tensor of a float"):
            if half in values:
                found = hvd.allreduce(of_rank(), op=hvd.Sum, prescale_factor=values[half])
                assert numbers(found) == [1.5] * 4, half
        for splits in ("array of two", "list of NumPy", "iterator", "tensor of several 32-bit integers"):
            if splits in values:
                assert numbers(hvd.alltoall(of_rank(), splits=values[splits])[0]) == [1.0, 1.0, 2.0, 2.0], splits
        for name in (
            "text of a subclass",
            "word of an enumeration",
            "a zero byte",
            "umlauts",
            "long text",
            "text of NumPy",
        ):
            assert numbers(hvd.allreduce(of_rank(), name=values[name], op=hvd.Sum)) == [3.0] * 4, name

    job_of(binding, ranks)(2, check)


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_script_whose_file_has_an_odd_name(ranks: Callable[..., RankPool], binding: str) -> None:
    def check() -> None:
        hvd = importlib.import_module(f"horovod.{binding}")
        names = {"hvd": hvd, "x": BINDINGS[binding].tensor()}
        exec(compile("hvd.allreduce(x); hvd.allgather(x, name='y')", "/tmp/\udcff.py", "exec"), names)
        hvd.allreduce(names["x"], name="afterwards")

    job_of(binding, ranks)(2, check)
