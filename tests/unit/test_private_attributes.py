"""Tests see of Horovod what any caller sees. Those that use a private attribute of it are listed here, with the reason."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import horovod

SOURCE = Path(horovod.__file__).parent
TESTS = Path(__file__).parents[1]

INTERFACE = {
    "_DistributedAdasumOptimizer", "_DistributedOptimizer", "_HorovodArgs", "_IS_TF2", "_LegacyOptimizer", "_allreduce",
    "_allreduce_grads", "_basics", "_bcast_object", "_check_has_gpu", "_get_process_set_ids_and_ranks",
    "_grouped_allreduce", "_grouped_reducescatter", "_keras", "_normalize_name", "_parameter_names",
    "_process_set_rank", "_process_set_size", "_reducescatter", "_run", "_temp_process_set_object", "_version",
}  # fmt: skip
"""Scripts and other packages use these names."""

ELSEWHERE = {
    "_check_input_dim", "_name", "_optimizer", "_post_accumulate_grad_hooks", "_replace", "_seed",
    "_set_static_graph", "_shutdown", "_torchdynamo_disable",
}  # fmt: skip
"""Names of Horovod's that objects of other packages have, too. Tests read them there."""

ALLOWED: dict[str, tuple[set[str], str]] = {
    # What a test must interrupt, replace or wait for inside of Horovod, and no caller can.
    "unit/core/workers.py": ({"_requests", "_state"}, "waits until a worker thread sleeps"),
    "unit/core/lifecycle/test_context.py": ({"_running"}, "several ranks in one process, which knows one"),
    "launcher/test_changed_on_the_way.py": ({"_write"}, "changes messages in the sender's process after they are sealed"),
    "launcher/test_elastic_state.py": ({"_hosts", "_listener"}, "waits for news, and leaves them to be taken"),
    "parallel/torch/test_steps_made.py": ({"_end"}, "what the interpreter calls when it ends"),
    "unit/tensorflow/test_data_compute_service.py": ({"_leave"}, "the handler of a compute job, called in this one"),
    "unit/base/test_signal_deferral.py": ({"_handlers", "_under_way"}, "a signal at each instruction of a function"),
    "unit/comm/gloo/test_collectives.py": (
        {"_collectives", "_left", "_number", "_start"}, "an operation that never ends, and that none is begun",
    ),
    "unit/comm/nccl/test_library.py": ({"_in_use"}, "another test in this process may have loaded PyTorch with CUDA"),
    "unit/comm/nccl/test_communicator.py": ({"_handle", "_lock", "_settle"}, "aborts at one moment of another thread"),
    "unit/comm/shm/test_direct.py": ({"_counters", "_words"}, "waits for a rank that has nothing to do but to wait"),
    "unit/comm/tcp/test_communicator.py": ({"_exchange", "_position_in_tree"}, "one exchange without a whole collective"),
    "unit/comm/tcp/test_transport.py": ({"_number"}, "after four thousand million collectives"),
    "nccl_host/test_handles.py": ({"_settle", "_written_by_nccl"}, "what NCCL may still write, and aborts at one moment"),
    "parallel/test_device_engine.py": ({"_open", "_open_events", "_written_by_nccl"}, "what a device still uses"),
    "parallel/torch/test_cuda.py": ({"_out"}, "an error of a device in the middle of a copy"),
    "unit/environments/test_environments.py": ({"_launcher_process"}, "a launcher above this process"),
    # Stand-ins for devices that are not here.
    "native_devices.py": ({"_loaded"}, "forgets the libraries of this process for a while"),
    "parallel/keras/test_gpus.py": ({"_computes_on_host", "_in_host_memory", "_lacking"}, "host memory as a device's"),
    "parallel/tensorflow/test_gpus.py": ({"_lacking"}, "host memory as a device's"),
    "parallel/torch/test_nccl.py": ({"_built", "_latest"}, "that NCCL was used, and not another engine"),
    "unit/comm/cuda/test_captures.py": ({"_context"}, "that the stand-in finds what breaks a capture"),
    "unit/comm/shm/test_cross_memory.py": ({"_libc"}, "the kernel's answers"),
    # Pure functions, all cases of which would be too many from outside.
    "parallel/test_adasum.py": ({"_portions"}, "how a batch is cut"),
    "unit/keras/test_settings.py": ({"_cut"}, "how variables are cut into groups"),
    "unit/torch/test_halves.py": ({"_mean"}, "all numbers of 16 bits"),
    "unit/comm/test_reduction.py": ({"_cast"}, "puts back what it has replaced"),
    "unit/bindings/test_reductions.py": ({"_last"}, "forgets the call before"),
    # That nothing accumulates, or is let go of.
    "parallel/tensorflow/test_many_at_once.py": ({"_Pending"}, "how many results are kept"),
    "parallel/tensorflow/test_saved_models.py": ({"_in_flight", "_queues"}, "that an operation ends with its graph"),
    "unit/comm/shm/test_proposals.py": ({"_words"}, "each access to shared memory, in every order"),
    "unit/comm/test_hierarchical.py": ({"_workspace"}, "the size of memory that NumPy has"),
    "unit/mxnet/ops/test_dependency_engine.py": ({"_pushed"}, "what is held while MXNet uses it"),
    "unit/observe/test_timeline.py": ({"_events", "_rows"}, "tables that would grow for ever"),
    "parallel/torch/test_optimizer_adversaries.py": ({"_horovod"}, "that no bucket waits for its gradients"),
    "parallel/torch/test_bucket_compression.py": ({"_horovod"}, "forgets what compression has left out"),
}  # fmt: skip
"""By file of the tests, the names that it uses, and what for. A test that can do without does not belong here."""


def is_private(name: str) -> bool:
    """A constant in capitals is not: a limit or a table, which a test may replace."""
    return name.startswith("_") and not name.startswith("__") and not name.isupper()


def defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a file gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if is_private(name):
            yield name


def own(tree: ast.AST) -> set[str]:
    """The private names that the file's own classes and functions have."""
    attributes = (each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and of_itself(each))
    stored = {each.attr for each in attributes if isinstance(each.ctx, ast.Store)}
    made = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.ClassDef))
    return {name for name in stored | {each.name for each in made} if is_private(name)}


def of_itself(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def used(tree: ast.AST) -> Iterator[str]:
    """The names that a file uses of other objects: as attributes, by import, in ``setattr`` and in programs in texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not of_itself(node):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("getattr", "setattr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "._" in node.value:
            try:
                program = ast.parse(node.value)
            except SyntaxError:
                continue
            yield from used(program)


def called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@functools.cache
def found() -> dict[str, set[str]]:
    """By file of the tests, the private names of Horovod's that it uses. It parses all sources and tests."""
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        names.update(defined(ast.parse(path.read_text())))
    names -= INTERFACE | ELSEWHERE
    uses: dict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if these := names.intersection(used(tree)) - own(tree):
            uses[str(path.relative_to(TESTS))] = these
    return uses


def test_no_other_test_uses_a_private_attribute() -> None:
    others = {path: names - allowed(path) for path, names in found().items()}
    assert not {path: names for path, names in others.items() if names}, "say what any caller sees instead"


def test_the_list_has_no_more_than_what_is_used() -> None:
    uses = found()
    unused = {path: allowed(path) - uses.get(path, set()) for path in ALLOWED}
    assert not {path: names for path, names in unused.items() if names}


def allowed(path: str) -> set[str]:
    names, _ = ALLOWED.get(path, (set(), ""))
    return names


def test_a_private_attribute_is_found_however_it_is_used() -> None:
    program = """
from horovod.core import _imported
worker._of_a_worker.public
setattr(worker, "_with_setattr", 1)
self._mine, cls._own, worker.public, worker.__dict__, worker._LIMIT
SCRIPT = "import x; x._in_a_program"
"""
    assert {name for name in used(ast.parse(program)) if is_private(name)} == {
        "_imported",
        "_in_a_program",
        "_of_a_worker",
        "_with_setattr",
    }
