"""The output of ``horovodrun --check-build``: what can be used here, as far as a few seconds can test it.

First the table that tools parse, with its fixed names; then launchers; then, for each row, the version, or what is missing and
the command that installs it.
"""

from __future__ import annotations

from functools import partial

import horovod
from horovod.comm import select
from horovod.comm.device import GPU
from horovod.comm.spans import HOST
from horovod.runner import probes
from horovod.runner.probes import ProbeResult

_FRAMEWORKS = {
    "TensorFlow": ("tensorflow", "horovod.tensorflow", "pip install tensorflow"),
    "PyTorch": ("torch", "horovod.torch", "pip install torch"),
    "MXNet": ("mxnet", "horovod.mxnet", "pip install mxnet==1.9.1 'numpy<1.24'"),
    "Keras": ("keras", "", "pip install keras"),
}
_SHM, _TCP = "Shared memory (built in)", "TCP (built in)"
_ENGINES = {_SHM: "shm", _TCP: "tcp"}
_LIBRARIES = {
    "NCCL": ("nccl", GPU, "pip install nvidia-nccl-cu12"),
    "CCL": ("ccl", HOST, "pip install oneccl"),
    "MPI": ("mpi", HOST, "pip install mpi4py mpich"),
    "Gloo": ("gloo", HOST, "pip install 'torch>=2.3'"),
}
"""Engines that need a library: their name and kind of device in the table of engines."""
_PROGRAMS = {
    "ssh": (("-V",), "apt-get install openssh-client"),
    "mpirun": (("--version",), "pip install mpich"),
    "srun": (("--version",), "apt-get install slurm-client"),
    "jsrun": (("--version",), ""),
    "torchrun": ((), "pip install torch"),
    "kubectl": (("version", "--client"), "apt-get install kubernetes-client"),
}
_LATER = ProbeResult(False, "there is none in this version of Horovod")
_TABLE = {
    "Available Frameworks": ("TensorFlow", "PyTorch", "MXNet"),
    "Available Controllers": ("MPI", "Gloo"),
    "Available Tensor Operations": ("NCCL", "DDL", "CCL", "MPI", "Gloo", _SHM, _TCP),
    "Available Launchers": ("horovodrun", *_PROGRAMS),
}


def check_build() -> str:
    """The table, and the details of each row. Takes a few seconds."""
    engines = probes.run_probes({name: partial(probes.engine, engine) for name, engine in _ENGINES.items()})
    frameworks = probes.run_probes(
        {name: partial(probes.framework, *arguments) for name, arguments in _FRAMEWORKS.items()}
        | {name: partial(probes.program, name, arguments, remedy) for name, (arguments, remedy) in _PROGRAMS.items()}
    )
    return render(engines | frameworks | {name: _library(*arguments) for name, arguments in _LIBRARIES.items()})


def _library(name: str, device: str, remedy: str) -> ProbeResult:
    version = select.engine(name, device).installed()
    return ProbeResult(bool(version), version or "not installed", remedy)


def render(findings: dict[str, ProbeResult]) -> str:
    """The text for findings of all probes. Pure."""
    launches = any(findings[name].usable for name in _ENGINES)
    findings = {
        **dict.fromkeys((*_LIBRARIES, "DDL"), _LATER),
        **findings,
        "horovodrun": ProbeResult(launches, "starts ranks on this host, and by ssh on others"),
    }
    lines = [f"Horovod v{horovod.__version__}:"]
    for title, names in _TABLE.items():
        lines += ["", f"{title}:"]
        for name in names:
            # The controller that scripts know by this name is the one that needs no MPI, which is built in.
            usable = launches if (title, name) == ("Available Controllers", "Gloo") else _of(findings, name).usable
            lines.append(f"    [{'X' if usable else ' '}] {name}")
    build = horovod.build_info()
    lines += ["", "Details:", f"  Horovod: {build['version']}, in {build['path']}"]
    rows = (*_FRAMEWORKS, *_ENGINES, "NCCL", "DDL", "CCL", "MPI", "Gloo", "horovodrun", *_PROGRAMS)
    lines += [f"  {name}: {_of(findings, name).detail}{_advice(_of(findings, name))}" for name in rows]
    engines = [engine for name, engine in _ENGINES.items() if findings[name].usable]
    lines += [
        f"  tensors in CPU memory travel by: {', '.join(engines) or 'nothing that works here'}",
        "  tensors in GPU memory travel by: "
        + (
            "NCCL in PyTorch, Keras on JAX and eager TensorFlow, where each rank has a GPU; else "
            if findings["NCCL"].usable
            else ""
        )
        + "the same, through host memory",
    ]
    return "\n".join(lines)


def _of(findings: dict[str, ProbeResult], name: str) -> ProbeResult:
    return findings.get(name, _LATER)


def _advice(finding: ProbeResult) -> str:
    return f". To add it: {finding.remedy}" if finding.remedy and not finding.usable else ""
