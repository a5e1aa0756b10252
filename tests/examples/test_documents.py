"""Are the documents true? Their links lead somewhere, the files and targets they name exist, their code runs.

What a document's blocks are, by the words after their opening fence:

- ``python``: all of a document run one after another as one program, on two ranks;
- ``python NAME``: the same, as a program of its own;
- ``python fails [VARIABLE=value ...]``: a program that fails on two ranks with what the next ``text`` block quotes;
- ``python horovodrun``: the same, but started by ``horovodrun``, whose own words are quoted, too;
- ``python diagnosed [VARIABLE=value ...]``: a program for three ranks; the next ``text`` block quotes the diagnosis;
- ``console``: a command that ends with status 2, having printed what stands below it.

In what is quoted, ``...`` stands for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import horovod
from free_ports import free_port
from launcher.harness import EAGER
from part import some
from ranks import RankPool
from time_limits import SOON

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "api"),
    ]
)
SOURCE = Path(horovod.__file__).resolve().parents[1]

PACKAGES = {"lightning", "accelerate", "transformers"}
"""Names of programs that need the package of that name."""

FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:src|docs|tests|examples|benchmarks)/[\w./-]*)`")
PART = re.compile(r"`([\w.][\w./-]*(?:\.py|/[\w.-]*))`")
TARGET = re.compile(r"(?:^ {4}|`)make ([a-z]+)", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """What GitHub makes of the document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_names_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue  # elsewhere on the network, which tests do not ask
        path, _, anchor = link.partition("#")
        target = (document.parent / path) if path else document
        assert target.exists(), f"{document.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{document.name} links to {link}: no such heading"
    for path in PATH.findall(text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in TARGET.findall(text):
        assert target in targets, f"{document.name} says 'make {target}'"


@pytest.mark.parametrize(
    "document",
    [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md", *sorted((ROOT / "docs" / "design").glob("*.md"))],
    ids=lambda path: path.name,
)
def test_what_is_said_of_the_tree_names_files_that_exist(document: Path) -> None:
    """There a file may be named by the end of its path."""
    tree = [f"/{path.relative_to(ROOT)}" for top in ("src", "tests", "docs", ".ci") for path in (ROOT / top).rglob("*")]
    for name in PART.findall(FENCED.sub("", document.read_text())):
        assert any(path.endswith(f"/{name.rstrip('/')}") for path in tree) or (ROOT / name).exists(), (
            f"{document.name} names {name}"
        )


def test_the_table_of_places_names_files_of_this_tree() -> None:
    """Each entry of "Where is what?" names files or folders by their paths below ``src/horovod``, or of the repository."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## Where is what?")[1].split("\n## ")[0]
    rows = re.findall(r"^\| Where (.+?)\? \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) >= 20
    assert len({question for question, _ in rows}) == len(rows)
    for question, paths in rows:
        named = re.findall(r"`([\w./-]+)`", paths)
        assert named, question
        for name in named:
            beside = [(SOURCE / "horovod" / other).parent / name for other in named]
            assert any(path.exists() for path in (SOURCE / "horovod" / name, ROOT / name, *beside)), (
                f"{question}: {name}"
            )


@pytest.mark.parametrize("package", ["Python", "PyTorch", "TensorFlow", "Keras 3", "MXNet", "mpi4py"])
def test_the_page_of_versions_has_the_bounds_of_the_package(package: str) -> None:
    (row,) = re.findall(
        rf"^\| {package} \| (.+?) \| (.+) \|$", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE
    )
    project, makefile = ((ROOT / name).read_text() for name in ("pyproject.toml", "Makefile"))
    bounds = {
        "Python": r'requires-python = ">=([\d.]+)"', "PyTorch": r'"torch>=([\d.]+)"', "TensorFlow": r'"tensorflow>=([\d.]+)"',
        "Keras 3": r'"keras>=([\d.]+)"', "MXNet": r'"mxnet==([\d.]+)"', "mpi4py": r'"mpi4py>=([\d.]+)"',
    }  # fmt: skip
    assert set(re.findall(bounds[package], project)) == {re.findall(r"[\d.]*\d", row[0])[0]}
    installed = {"PyTorch": r"^TORCH \?= torch==(\S+)", "TensorFlow": r"^TENSORFLOW \?= tensorflow-cpu==(\S+)"}
    if package in installed:
        assert re.findall(installed[package], makefile, re.MULTILINE) == [re.findall(r"[\d.]*\d", row[1])[0]]


def horovodrun(folder: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher to its end, as a user does."""
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    return subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(SOURCE), EAGER])} | extra,
        capture_output=True,
        text=True,
        timeout=SOON,
    )


def test_the_readme_program_trains_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    blocks = FENCED.findall((ROOT / "README.md").read_text())
    ((program, shown),) = [
        (code, output.split("\n", 1)[1]) for (words, code), (_, output) in pairwise(blocks) if words == "python"
    ]
    (tmp_path / "train.py").write_text(program)
    done = horovodrun(tmp_path, "-np", "2", sys.executable, "train.py", PYTHONPATH=str(SOURCE))
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr
    assert done.stdout == shown


def test_the_readme_says_what_an_elastic_job_prints_when_it_loses_a_rank(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = (ROOT / "README.md").read_text()
    (quoted,) = [code for words, code in FENCED.findall(text) if words == "text" and "--min-np" in code]
    command, *lines = quoted.splitlines()
    (tmp_path / "train.py").write_text(LOSES_A_RANK)
    prompt, program, *arguments = shlex.split(command)
    assert (prompt, program) == ("$", "horovodrun")
    done = horovodrun(tmp_path, *(sys.executable if each == "python" else each for each in arguments))
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines() + done.stderr.splitlines()
    assert all(line in printed for line in lines), printed


LOSES_A_RANK = """
import os, signal, torch
import horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(20, 3)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)

@hvd.elastic.run
def train(state):
    while state.step < 100:
        if state.step == 50 and hvd.rank() == 1 and hvd.size() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()

train(state)
if hvd.rank() == 0:
    print(f"{state.step} steps, {hvd.size()} ranks")
"""


def programs(document: Path) -> dict[str, list[str]]:
    """The Python blocks that run without failing, by the program they belong to."""
    found: dict[str, list[str]] = {}
    for words, code in FENCED.findall(document.read_text()):
        language, _, name = words.partition(" ")
        if language == "python" and name.split(" ")[0] not in ("fails", "horovodrun", "diagnosed", "ray", "spark"):
            found.setdefault(name, []).append(code)
    return found


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if d.name != "README.md" and programs(d)], ids=lambda path: path.name
)
def test_programs_run_on_two_ranks(document: Path, ranks: Callable[..., RankPool]) -> None:
    pytest.importorskip("torch")
    for package in PACKAGES & set(programs(document)):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[integrations]'")
    ports = {name: free_port() for name in programs(document)}
    trained = ranks(2, framework="torch").run(_run_programs, document.name, programs(document), ports)
    for weights in trained:
        assert weights.get("ddp") == pytest.approx(weights.get("hvd"), abs=1e-5), "both programs train the same"
    assert trained[0].get("hvd") == trained[1].get("hvd")


def _run_programs(document: str, programs: dict[str, list[str]], ports: dict[str, int]) -> dict[str, list[float]]:
    """Runs on a rank: each program to its end; the weights that those with names trained.

    Each has a port of its own for the store of ``torch.distributed``: at the port of the program before, a rank that is
    ahead would find the store that rank 0 is about to end.
    """
    import os

    import torch.distributed

    import horovod.torch as hvd
    from horovod._base import config

    destroy = torch.distributed.destroy_process_group

    def destroy_when_all_have_finished() -> None:
        """Gloo may fail a rank's last collective when another, which has finished it, closes its connections."""
        hvd.init()
        hvd.barrier()
        hvd.shutdown()
        destroy()

    before = dict(os.environ)
    environment = {"MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    environment |= {"RANK": before[config.RANK], "LOCAL_RANK": before[config.RANK], "WORLD_SIZE": before[config.SIZE]}
    weights = {}
    torch.distributed.destroy_process_group = destroy_when_all_have_finished
    try:
        for name, blocks in programs.items():
            variables: dict[str, Any] = {"__name__": "__main__"}
            os.environ |= environment | {"MASTER_PORT": str(ports[name])}  # a program may take some away
            try:
                for number, block in enumerate(blocks, 1):
                    exec(compile(block, f"{document}, block {number} of {name or 'the program'}", "exec"), variables)
            finally:
                hvd.shutdown()
                if torch.distributed.is_initialized():  # it failed, or leaves that to the end of the process
                    destroy()
            if name:
                weights[name] = [x for p in variables["model"].parameters() for x in p.detach().flatten().tolist()]
    finally:
        torch.distributed.destroy_process_group = destroy
        os.environ.clear()
        os.environ.update(before)
    return weights


def failures(start: str) -> list[Any]:
    """The programs that are to fail, those whose first word is ``start``: the other words, the code, what is quoted."""
    found = []
    for document in DOCUMENTS:
        blocks = FENCED.findall(document.read_text())
        for (words, code), (after, quoted) in pairwise(blocks):
            language, *rest = words.split(" ")
            if language == "python" and rest and rest[0] == start:
                assert after == "text", f"{document.name}: nothing quoted after:\n{code}"
                found.append(pytest.param(rest[1:], code, quoted, id=f"{document.stem}: {quoted[:40]}"))
    return found


DIAGNOSED = failures("diagnosed")


def quotes(quoted: str, printed: str) -> bool:
    """Whether all of a quotation stands in what was printed."""
    return (
        re.search(r".*?".join(re.escape(part) for part in quoted.strip().split("...")), printed, re.DOTALL) is not None
    )


@pytest.mark.parametrize(("settings", "code", "quoted"), failures("fails"))
def test_what_fails_says_so(settings: list[str], code: str, quoted: str, ranks: Callable[..., RankPool]) -> None:
    pytest.importorskip("torch")
    told = ranks(2, framework="torch").run(_run_failing, code, dict(word.split("=") for word in settings))
    assert any(quotes(quoted, each) for each in told), "\n".join(told)


def _run_failing(code: str, settings: dict[str, str]) -> str:
    """Runs on a rank: a program that fails there, or on the others; what it said."""
    import logging
    import os

    import horovod.torch as hvd

    before = dict(os.environ)
    os.environ |= settings
    logging.getLogger("horovod").setLevel(logging.CRITICAL)
    try:
        exec(compile(code, "/home/me/train.py", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        hvd.shutdown()
        os.environ.clear()
        os.environ.update(before)
    return ""


@pytest.mark.parametrize(("_", "code", "quoted"), failures("horovodrun"))
def test_what_the_launcher_says_of_a_failure(_: list[str], code: str, quoted: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(code)
    done = horovodrun(tmp_path, "-np", "2", sys.executable, "train.py")
    assert done.returncode and quotes(quoted, done.stderr), done.stderr


@pytest.mark.parametrize(("settings", "code", "quoted"), some(DIAGNOSED, DIAGNOSED[::2]))
def test_what_is_diagnosed(settings: list[str], code: str, quoted: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(code)
    env = dict(word.split("=") for word in settings) | {"HOROVOD_FLIGHT_RECORDER_DIR": str(tmp_path / "recorders")}
    horovodrun(tmp_path, "-np", "3", sys.executable, "train.py", **env)
    program = [sys.executable, "-m", "horovod.diagnose", str(tmp_path / "recorders")]
    done = subprocess.run(
        program, env=os.environ | {"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=SOON
    )
    assert quotes(quoted, done.stdout), done.stdout + done.stderr


COMMANDS = [
    (document.name, code)
    for document in DOCUMENTS
    for words, code in FENCED.findall(document.read_text())
    if words == "console"
]


@pytest.mark.parametrize(("document", "block"), COMMANDS)
def test_commands_that_are_wrong_are_told_so(document: str, block: str, tmp_path: Path) -> None:
    command, quoted = block.split("\n", 1)
    prompt, program, *arguments = shlex.split(command)
    assert (prompt, program) == ("$", "horovodrun")
    done = horovodrun(tmp_path, *arguments)
    assert done.returncode == 2 and quotes(quoted, done.stderr), done.stderr
