"""Builds NCCL's own host code for machines without a GPU: ``python build.py SOURCE HEADERS OUT`` makes OUT/libnccl.so.2.

SOURCE is an archive of NCCL's source (2.27.5 was tried), HEADERS the folder with ``cuda_runtime.h`` of CUDA 13. A C++ compiler
is all that is needed besides: the device's code is left out, and each kernel becomes an empty function. ``cuda.c`` and
``nvml.c`` play CUDA's runtime and NVIDIA's management library. What NCCL does on the host stays as it is: it starts and splits
communicators, connects ranks, checks arguments, finds duplicate devices, aborts and finalizes. No data moves.

``make test-nccl-host`` calls this and runs the tests beside it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOT_HOST_CODE = ("enhcompat.cc", "ras/client.cc")
"""Files of NCCL for static libraries of CUDA, and of a program."""
KERNEL = re.compile(r"^\s*__global__ void (nccl\w+)\((\w+) const\);", re.MULTILINE)


def main(source: Path, headers: Path, out: Path) -> None:
    if not (headers / "cuda_runtime.h").exists():
        sys.exit(f"{headers} has no cuda_runtime.h: give the folder with CUDA's headers")
    version = re.search(r"CUDART_VERSION\s+(\d+)", (headers / "cuda_runtime_api.h").read_text())
    assert version is not None
    major, minor = divmod(int(version[1]) // 10, 100)
    objects, tree = out / "objects", out / "source"
    objects.mkdir(parents=True, exist_ok=True)
    nccl = unpack(source, tree)
    include = prepare(nccl, release(source, tree), out)
    flags = [
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-w",
        f"-DCUDA_MAJOR={major}",
        f"-DCUDA_MINOR={minor}",
        "-DNVTX_DISABLE",
        "-DPROFAPI",
    ]
    folders = [include, nccl / "include", nccl / "include" / "plugin", headers, headers / "cccl"]
    flags += [f"-I{folder}" for folder in folders]
    made = compile_all(
        nccl, [*host_code(nccl), *sorted((out / "generated").glob("*.cc")), HERE / "kernels.cc"], objects, flags
    )
    plain = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-O1", "-fPIC", "-shared"]
    cc, cxx = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
    subprocess.run([cc, *plain, "-o", out / "libnvidia-ml.so.1", HERE / "nvml.c"], check=True)
    runtime = objects / "cuda.o"
    plain.remove("-shared")
    subprocess.run([cc, *plain, f"-isystem{headers}", "-c", HERE / "cuda.c", "-o", runtime], check=True)
    link = ["-shared", "-Wl,-soname,libnccl.so.2", "-Wl,-rpath,$ORIGIN", "-Wl,--no-undefined", "-pthread"]
    subprocess.run([cxx, *link, "-o", out / "libnccl.so.2", *made, runtime, "-lrt", "-ldl"], check=True)
    print(f"built {out / 'libnccl.so.2'}")


def unpack(source: Path, tree: Path) -> Path:
    """The folder ``src`` of the archive."""
    with tarfile.open(source) as archive:
        archive.extractall(tree, filter="data")
    found = sorted(tree.rglob("nccl.h.in"))
    if not found:
        sys.exit(f"{source} is no archive of NCCL's source: it has no nccl.h.in")
    return found[0].parent


def release(source: Path, tree: Path) -> tuple[str, str, str]:
    """The version, from the source or, if that does not tell, from the archive's name."""
    for each in tree.rglob("version.mk"):
        told = dict(re.findall(r"NCCL_(MAJOR|MINOR|PATCH)\s*:=\s*(\d+)", each.read_text()))
        if len(told) == 3:
            return told["MAJOR"], told["MINOR"], told["PATCH"]
    named = re.search(r"(\d+)\.(\d+)\.(\d+)", source.name)
    if named is None:
        sys.exit(f"neither {source} nor its name tells the version of NCCL")
    return named[1], named[2], named[3]


def prepare(nccl: Path, version: tuple[str, str, str], out: Path) -> Path:
    """Write the public header and the tables of kernels. Returns the folder of the header."""
    include, generated = out / "include", out / "generated"
    include.mkdir(exist_ok=True)
    generated.mkdir(exist_ok=True)
    major, minor, patch = version
    text = (nccl / "nccl.h.in").read_text()
    code = str(int(major) * 10000 + int(minor) * 100 + int(patch))
    for name, value in (("Major", major), ("Minor", minor), ("Patch", patch), ("Suffix", ""), ("Version", code)):
        text = text.replace("${nccl:" + name + "}", value)
    (include / "nccl.h").write_text(text)
    for script, table in (("generate.py", "host_table.cc"), ("symmetric/generate.py", "symmetric_kernels.cc")):
        folder = out / "kernels" / table
        folder.mkdir(parents=True, exist_ok=True)
        if (nccl / "device" / script).exists():
            subprocess.run([sys.executable, script, folder], cwd=nccl / "device", check=True, stdout=subprocess.DEVNULL)
            (generated / table).write_text(KERNEL.sub(r"void \1(\2 const) {}", (folder / table).read_text()))
    return include


def host_code(nccl: Path) -> Iterator[Path]:
    for path in sorted(nccl.rglob("*.cc")):
        name = path.relative_to(nccl).as_posix()
        if name not in NOT_HOST_CODE and not name.startswith("device/"):
            yield path


def compile_all(nccl: Path, sources: list[Path], objects: Path, flags: list[str]) -> list[Path]:
    """Compile each file that was not compiled before."""

    def compile_one(path: Path) -> Path:
        name = path.relative_to(nccl).as_posix() if path.is_relative_to(nccl) else path.name
        made = objects / f"{name.replace('/', '-')}.o"
        if not made.exists():
            half = made.with_suffix(".half")
            subprocess.run([os.environ.get("CXX", "c++"), *flags, "-c", path, "-o", half], cwd=nccl, check=True)
            half.rename(made)
        return made

    jobs = int(os.environ.get("JOBS", os.cpu_count() or 1))
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(compile_one, sources))


if __name__ == "__main__":
    main(*(Path(argument).resolve() for argument in sys.argv[1:4]))
