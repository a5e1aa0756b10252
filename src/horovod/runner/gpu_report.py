"""``horovodrun --check-gpu``: tests on the GPUs of this machine what only GPUs can show, and writes a report to a file.

It asks for versions and the topology, starts ranks for one section after another (:mod:`horovod.check_gpu`), each with a
limit, and ends after five minutes at most. It changes no setting of a GPU. On a machine without a GPU it runs the sections
that work on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import horovod
from horovod._base import config
from horovod.comm.nccl.engine import SERVES_SEVERAL, SEVERAL_RANKS
from horovod.comm.nccl.library import code_of, text_of

SECONDS = 300.0
"""The limit of the whole."""
REPORT = "horovod-gpu-report.txt"
PASSED = "passed:"
"""How the last line of a section begins that rank 0 prints."""

_LEAST_SECONDS = 5.0
_MOST_RANKS = 8
_PACKAGES = (
    "torch",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
    "triton",
    "numpy",
)
_QUESTIONS = (
    ("nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,compute_mode,mig.mode.current", "--format=csv"),
    ("nvidia-smi", "topo", "-m"),
    ("rocm-smi", "--showproductname", "--showdriverversion", "--showtopo"),
)
"""Commands that only show."""
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Exit|Failure)\b.*$", re.MULTILINE)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
"""Colours and the like, for terminals."""
_PREFIX = re.compile(r"^\[\d+\]<std(out|err)>:", re.MULTILINE)


class SectionSettings(NamedTuple):
    """How one section runs.

    Attributes:
        seconds: its time limit.
        on_cpus: whether it shows anything on CPUs.
        environment: variables of its ranks.
        loses: a rank of it ends, so the job is to fail.
    """

    seconds: float
    on_cpus: bool = True
    environment: Mapping[str, str] = {}
    loses: bool = False


SECTION_SETTINGS = {
    "engine": SectionSettings(45),
    "results": SectionSettings(40),
    "operations": SectionSettings(40, environment={config.DYNAMIC_PROCESS_SETS: "1"}),
    "beside_torch": SectionSettings(60),
    "capture": SectionSettings(40, on_cpus=False),
    "memory": SectionSettings(40, on_cpus=False),
    "batchnorm": SectionSettings(30),
    "latency": SectionSettings(40),
    "process_group": SectionSettings(40),
    "wrapped": SectionSettings(40),
    "late": SectionSettings(60, on_cpus=False, environment={config.TIMEOUT_SECONDS: "4"}),
    "dies": SectionSettings(40, loses=True),
    "compiled": SectionSettings(90, on_cpus=False),
}
"""In the order in which they run: what tells most comes first."""


class Facts(NamedTuple):
    """What PyTorch says of this machine.

    Attributes:
        gpus: the names of the GPUs that it may use.
        torch: its version, with what it was built for; "" if it cannot be imported.
        nccl: the version code of the library that would be used; 0 for none.
        where: that library's file, or why there is none.
    """

    gpus: tuple[str, ...] = ()
    torch: str = ""
    nccl: int = 0
    where: str = ""


_FACTS = """
import json, torch
from horovod.comm.nccl import library
try:
    nccl, where = library.loaded().version(), library.find()
except Exception as error:
    nccl, where = 0, str(error)
gpus = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
built = torch.version.hip and f"ROCm {torch.version.hip}" or torch.version.cuda and f"CUDA {torch.version.cuda}" or "CPUs alone"
print("facts:" + json.dumps([gpus, f"{torch.__version__}, built for {built}", nccl, where]))
"""


def ask_torch() -> Facts:
    done = subprocess.run([sys.executable, "-c", _FACTS], capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"^facts:(.*)$", done.stdout, re.MULTILINE)
    if found is None:
        lines = done.stderr.strip().splitlines()
        return Facts(where=f"PyTorch cannot be imported: {lines[-1] if lines else 'it ended without an error'}")
    gpus, *others = json.loads(found[1])
    return Facts(tuple(gpus), *others)


class Plan(NamedTuple):
    """How the sections run.

    Attributes:
        ranks: how many.
        environment: variables of all ranks.
        summary: what that means, for the user.
    """

    ranks: int
    environment: dict[str, str]
    summary: str


def plan_of(facts: Facts) -> Plan:
    """The plan for a machine. Pure."""
    cards = len(facts.gpus)
    ranks, nccl, wanted = (
        min(max(cards, 2), _MOST_RANKS),
        {config.GPU_OPERATIONS: "NCCL"},
        text_of(code_of(SERVES_SEVERAL)),
    )
    if not cards:
        return Plan(
            ranks,
            {},
            "There is no GPU that PyTorch can use here. Two ranks run the sections that work on CPUs: this shows whether the "
            "installation works, but nothing about GPUs.",
        )
    if not facts.nccl:
        return Plan(ranks, {}, f"NCCL cannot be used, so tensors travel through host memory: {facts.where}")
    if cards > 1:
        return Plan(ranks, nccl, f"{ranks} ranks, each with a GPU of its own, by NCCL.")
    if facts.nccl >= code_of(SERVES_SEVERAL):
        return Plan(
            ranks,
            {**nccl, SEVERAL_RANKS: "1"},
            "Two ranks share the one GPU by NCCL and take turns: this shows results, errors and the host's costs, but no "
            "bandwidth.",
        )
    return Plan(
        ranks,
        {},
        f"NCCL {text_of(facts.nccl)} refuses two ranks on one GPU, so tensors travel through host memory. With NCCL {wanted} "
        "or newer (pip install --upgrade nvidia-nccl-cu12, or -cu13 to match PyTorch) this check uses NCCL.",
    )


class SectionResult(NamedTuple):
    """What came of a section: "passed", "FAILED" or "left out", with the reason; and what it printed."""

    verdict: str
    output: str
    seconds: float = 0.0


def check(
    facts: Facts,
    command: Sequence[str] = (sys.executable, "-m", "horovod.check_gpu"),
    tell: Callable[[str], None] = print,
    only: Sequence[str] = (),
    seconds: float = SECONDS,
) -> tuple[Plan, dict[str, SectionResult]]:
    """Run the sections.

    Args:
        command: starts one rank, followed by the name of a section.
        tell: called with a line when a section has ended.
        only: the names of the sections to run; empty for all.
        seconds: the limit of all.
    """
    plan, found = plan_of(facts), dict[str, SectionResult]()
    end = time.monotonic() + seconds
    for name, section in SECTION_SETTINGS.items():
        if only and name not in only:
            continue
        left = end - time.monotonic()
        if not facts.gpus and not section.on_cpus:
            found[name] = SectionResult("left out: there is no GPU", "")
        elif left < _LEAST_SECONDS:
            found[name] = SectionResult("left out: no time was left", "")
        else:
            found[name] = _run(name, section, plan, command, min(section.seconds, left))
        tell(f"{name:>14}: {found[name].verdict}" + (f" ({found[name].seconds:.0f} s)" if found[name].output else ""))
    return plan, found


_LAUNCH = "import sys; from horovod.runner.launch import run_commandline; sys.exit(run_commandline())"


def _run(name: str, section: SectionSettings, plan: Plan, command: Sequence[str], seconds: float) -> SectionResult:
    begin = time.monotonic()
    environment = {**os.environ, **plan.environment, **section.environment, "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-c", _LAUNCH, "-np", str(plan.ranks), *command, name]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        job = subprocess.Popen(
            words, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        late = ""
        try:
            job.wait(seconds)
        except subprocess.TimeoutExpired:
            late = f"FAILED: did not finish within {seconds:.0f} seconds"
        finally:
            _end(job)
        output.seek(0)
        text = _PREFIX.sub("", output.read())
    passed = f"{PASSED} {name}" in text and (job.returncode == 0) != section.loses
    error = _ERROR.search(text)
    reason = f"exit code {job.returncode}" if error is None else error[0][:300]
    verdict = late or ("passed" if passed else f"FAILED: {reason}")
    return SectionResult(verdict, text, time.monotonic() - begin)


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a job that is still there: it ends its ranks."""
    if job.poll() is None:
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(15)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def report(facts: Facts, plan: Plan, found: Mapping[str, SectionResult]) -> str:
    """The text of the file."""
    build = horovod.build_info()
    lines = [
        f"Report of horovodrun --check-gpu, Horovod {build['version']}",
        "",
        plan.summary,
        "",
        f"GPUs: {', '.join(facts.gpus) or 'none'}",
        f"PyTorch: {facts.torch or facts.where}",
        f"NCCL: {f'{text_of(facts.nccl)}, {facts.where}' if facts.nccl else facts.where}",
        f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPUs",
        f"Packages: {', '.join(_packages()) or 'none of those that matter'}",
        f"Variables: {', '.join(_variables()) or 'none'}",
        "",
        "Sections",
        *(f"  {name:>14}: {outcome.verdict}" for name, outcome in found.items()),
    ]
    for question in _QUESTIONS:
        lines += ["", f"$ {' '.join(question)}", _answer(question)]
    for name, outcome in found.items():
        if outcome.output:
            lines += ["", f"== {name}: {outcome.verdict}, {outcome.seconds:.0f} s", outcome.output.strip()]
    return "\n".join(lines) + "\n"


def _packages() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _variables() -> list[str]:
    """Those that change what NCCL and Horovod do. No secret is among them."""
    names = [name for name in os.environ if name.startswith(("NCCL_", "HOROVOD", "CUDA_VISIBLE", "PYTORCH_CUDA"))]
    return [f"{name}={os.environ[name]}" for name in sorted(names) if "SECRET" not in name]


def _answer(question: Sequence[str]) -> str:
    try:
        done = subprocess.run(question, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not answered: {error}"
    return _ESCAPE.sub("", done.stdout + done.stderr).strip()


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if no section failed, and there is a GPU."""
    parser = argparse.ArgumentParser(prog="horovodrun --check-gpu", description=__doc__)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTION_SETTINGS)} (default: all)"
    )
    parser.add_argument("--output", type=Path, default=Path(REPORT), help=f"the file of the report (default: {REPORT})")
    options = parser.parse_args(list(arguments))
    if unknown := [name for name in options.sections if name not in SECTION_SETTINGS]:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTION_SETTINGS)}")
    facts = ask_torch()
    if not facts.torch:
        print(f"{facts.where}. This check needs PyTorch: pip install 'horovod[torch]'", file=sys.stderr)
        return 2
    print(f"{plan_of(facts).summary}\nThis takes {SECONDS / 60:.0f} minutes at most.", flush=True)
    plan, found = check(facts, tell=lambda line: print(line, flush=True), only=options.sections)
    options.output.write_text(report(facts, plan, found))
    failed = [name for name, outcome in found.items() if outcome.verdict.startswith("FAILED")]
    print(f"failed: {', '.join(failed) or 'none'}")
    print(f"The report is in {options.output}: please paste it into an issue of the project.")
    return 1 if failed or not facts.gpus else 0
