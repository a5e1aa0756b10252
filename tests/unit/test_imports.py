"""Imports run one way: every package imports only what stands below it in the table, and so does every folder of a package."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from time_limits import SOON

SOURCE = Path(__file__).resolve().parents[2] / "src" / "horovod"

Layers = Sequence[set[str]]

LAYERS: Layers = [
    {"__init__"},
    {"_old_paths", "check_gpu", "ray", "spark"},
    {"tensorflow.__init__"},
    {"tensorflow.distributed_optimizer"},
    {"keras", "tensorflow.keras", "_torch_backend"},
    {"_keras"},
    {"tensorflow", "torch", "mxnet"},
    {"_models"},
    {"common.elastic"},
    {"elastic", "local_training"},
    {"comparison"},
    {"runner", "_bindings"},
    {"common"},
    {"timeline", "top"},
    {"diagnose"},
    {"core", "environments"},
    {"autotune"},
    {"comm", "control", "observe"},
    {
        "_base",
        "data",
    },
]
"""From the top. A package may import every package of a lower layer, none of its own layer, and none of a higher one."""

FOLDERS: Mapping[str, Layers] = {
    "core": [
        {"submission"},
        {"lifecycle"},
        {"worker"},
        {"engines"},
        {"requests"},
        {"negotiation"},
        {"errors"},
    ],
    "control": [
        {"reachability", "rendezvous"},
        {"mesh"},
        {"dial", "liveness_monitor"},
        {"liveness_links"},
        {"channel", "failure_detector", "listener", "liveness_messages"},
        {"connection"},
        {
            "fd_limit",
            "elastic_messages",
            "failure",
            "handshake",
            "liveness_tree",
            "lost_rank",
            "networks",
            "sealing",
            "secret",
            "slurm_address",
            "wakeup",
        },
        {"processes"},
    ],
    "comm": [
        {"select"},
        {"late", "switching"},
        {"gloo", "hierarchical", "mpi", "nccl", "ccl", "shm", "tcp"},
        {"adasum", "bytewise", "cuda", "engine", "exchange", "forwarding", "single"},
        {"base", "device", "ranges"},
        {"compression"},
        {"spans"},
        {"reduction"},
        {"datatypes", "lasting", "tuned"},
    ],
    "runner": [
        {"__init__"},
        {"launch", "on_spark"},
        {"function"},
        {"jobs"},
        {"elastic", "external"},
        {"job"},
        {"checks", "description", "supervisor"},
        {"arguments", "flight_recorders", "policy", "reach", "rendezvous_server", "worker_environment"},
        {"hosts", "output"},
        {"config_file", "dry_run", "help_text", "options"},
        {"agent", "check_build", "gpu_report", "run_task", "tunables"},
        {"open_files"},
        {"compute_service", "errors", "event_loop", "machine", "probes", "remote_call", "signals"},
        {"children", "timeout"},
    ],
    "torch": [
        {"__init__"},
        {"elastic"},
        {"functions", "sync_batch_norm"},
        {"fused_batch_norm", "mpi_ops", "optimizer"},
        {"distributed", "ops"},
        {"device"},
        {"compression", "storage_references", "tensors", "uncompiled"},
    ],
    "tensorflow": [
        {"__init__"},
        {"distributed_optimizer"},
        {"keras", "optimizer"},
        {"data", "gradient_aggregation"},
        {"functions", "mpi_ops", "sync_batch_norm", "training"},
        {"elastic", "ops"},
        {"lifecycle", "reduced_marks"},
        {"graph"},
        {"device"},
        {"tensors"},
        {"compression", "data_order", "errors", "util"},
    ],
    "_keras": [
        {"__init__"},
        {"by_version"},
        {"loading"},
        {"legacy", "optimizer"},
        {"backends"},
        {"callbacks", "distribution", "last_steps", "local_training"},
        {"broadcasting", "compilation", "copies", "custom_steps", "guarding", "in_place_exchange", "learning_rate"},
        {"first_step"},
        {"elastic", "loss_scale", "naming", "settings", "values"},
    ],
}
"""The same for the files and folders of the packages that have an order inside."""

DYNAMIC = {"import_module", "__import__"}
"""Calls whose first argument is a module. With a name of this project they count as imports; others cannot be followed."""


def entry_of(module: str, layers: Layers) -> str:
    """The entry of a table that a module belongs to; its name as after ``horovod.``, or as after the folder's."""
    listed = [entry for entries in layers for entry in entries if f"{module}.".startswith(f"{entry}.")]
    return max(listed, key=len, default=module.partition(".")[0])


def level(entry: str, layers: Layers) -> int:
    return next(number for number, entries in enumerate(layers) if entry in entries)


def imports(tree: ast.AST) -> Iterator[str]:
    """Each module under ``horovod`` that is imported, without that prefix."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from imports(other)
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and called(node) in DYNAMIC:
            named = node.args[0]
            names = [named.value] if isinstance(named, ast.Constant) and isinstance(named.value, str) else []
        for name in names:
            if name.startswith("horovod.") and name.partition(".")[2] != "__version__":
                yield name.removeprefix("horovod.")
        yield from imports(node)


def called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@functools.cache
def modules(source: Path) -> dict[str, ast.AST]:
    """Every module, by its name after ``horovod.``."""
    paths = sorted(source.rglob("*.py"))
    return {".".join(path.relative_to(source).with_suffix("").parts): ast.parse(path.read_text()) for path in paths}


def against(source: Path, layers: Layers, folder: str = "") -> dict[tuple[str, str], set[str]]:
    """Each import against the order, also inside of a function, as (importing entry, imported entry), with the modules."""
    prefix = f"{folder}." if folder else ""
    found: dict[tuple[str, str], set[str]] = {}
    for module, tree in modules(source).items():
        if not module.startswith(prefix):
            continue
        own = entry_of(module.removeprefix(prefix), layers)
        for imported in imports(tree):
            if not imported.startswith(prefix):
                continue
            other = entry_of(imported.removeprefix(prefix), layers)
            if own != other and level(own, layers) >= level(other, layers):
                found.setdefault((own, other), set()).add(module)
    return found


def names_in(folder: Path) -> set[str]:
    """The modules and packages of a folder."""
    return {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def circle(source: Path) -> list[str]:
    """Modules that import one another in a circle; empty if there is none."""
    trees = modules(source)
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        graph[module] = set()
        for imported in imports(tree):
            while imported and imported not in trees and f"{imported}.__init__" not in trees:
                imported = imported.rpartition(".")[0]
            name = imported if imported in trees else f"{imported}.__init__"
            if imported and name != module:
                graph[module].add(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_package_has_a_place_in_the_table() -> None:
    listed = {package for packages in LAYERS for package in packages if "." not in package}
    assert names_in(SOURCE) == listed


@pytest.mark.parametrize("folder", FOLDERS)
def test_everything_in_a_folder_has_a_place_in_its_table(folder: str) -> None:
    listed = {entry for entries in FOLDERS[folder] for entry in entries if "." not in entry}
    assert names_in(SOURCE / folder) - {"__init__"} == listed - {"__init__"}


def test_imports_run_one_way() -> None:
    wrong = against(SOURCE, LAYERS)
    assert not wrong, f"imports against the order: {wrong}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_one_way_inside_of_a_folder(folder: str) -> None:
    wrong = against(SOURCE, FOLDERS[folder], folder)
    assert not wrong, f"imports against the order: {wrong}"


def test_no_modules_import_one_another() -> None:
    assert circle(SOURCE) == []


@pytest.mark.parametrize(
    "line",
    [
        "from horovod.core.lifecycle import context",
        "import horovod.core.lifecycle.context",
        "def later():\n    from horovod.core.lifecycle.context import current",
        "import importlib\ncontext = importlib.import_module('horovod.core.lifecycle.context')",
        "context = __import__('horovod.core.lifecycle.context')",
    ],
)
def test_a_file_that_imports_upward_is_found(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "core" / "negotiation"
    folder.mkdir(parents=True)
    (folder / "agreement.py").write_text(f"from horovod.core.errors import SHUT_DOWN\n{line}\n")
    assert against(tmp_path, FOLDERS["core"], "core") == {("negotiation", "lifecycle"): {"core.negotiation.agreement"}}


def test_an_import_between_packages_of_one_layer_is_found(tmp_path: Path) -> None:
    (tmp_path / "comm").mkdir()
    (tmp_path / "comm" / "base.py").write_text("import horovod.control.mesh\n")
    assert against(tmp_path, LAYERS) == {("comm", "control"): {"comm.base"}}


def test_modules_that_import_one_another_are_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from horovod.two import a\n")
    (tmp_path / "two.py").write_text("def later():\n    from horovod import one\n    import horovod.one\n")
    assert set(circle(tmp_path)) == {"one", "two"}


@pytest.mark.parametrize("module", ["horovod", "horovod.common.basics", "horovod.runner"])
def test_importing_the_package_imports_no_framework(module: str) -> None:
    frameworks = ["torch", "tensorflow", "keras", "mxnet", "jax"]
    program = f"import sys, {module}; print([name for name in {frameworks} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_does_not_import_the_launcher() -> None:
    program = "import sys, horovod; print('horovod.runner' in sys.modules, callable(horovod.run))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_runtime_starts_without_what_only_its_reports_need() -> None:
    """Packages' metadata come with the package email: a tenth of what a rank imports before it can call init()."""
    program = "import sys, horovod.common.basics; print('importlib.metadata' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON, check=True)
    assert done.stdout.strip() == "False"
