"""NCCL's C interface as it is declared here, and what is said of a library that will not do."""

from __future__ import annotations

import ctypes
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from horovod.comm.base import DeviceFailure
from horovod.comm.nccl import communicator, library
from horovod.comm.nccl import handle as handle
from horovod.comm.nccl.library import Nccl, NcclConfig, UniqueId, code_of, text_of
from recorded_nccl import RecordedNccl


def test_every_function_that_is_called_has_its_types() -> None:
    called = set(re.findall(r"\bnccl[A-Z]\w+", "".join(map(inspect.getsource, (communicator, handle, library)))))
    called -= {name for name in called if name.startswith(("ncclScalar", "ncclDataType", "ncclRedOp_t", "ncclResult"))}
    called -= {"ncclConfig_t", "ncclUniqueId"}
    types = {name for name in called if name.endswith("_t")}
    assert called - types == set(library._PROTOTYPES)
    assert {name for name in vars(RecordedNccl) if name.startswith("nccl")} == set(library._PROTOTYPES)


def test_the_types_are_those_of_the_prototype_beside_them() -> None:
    """One argument for each of the prototype's, and an address for each pointer."""
    text = re.sub(r"\n +#  +", " ", inspect.getsource(library))
    for name, (_, arguments) in library._PROTOTYPES.items():
        found = re.search(rf"# [^\n]*\b{name}\(([^)]*)\)", text)
        assert found is not None, name
        declared = [each for each in found[1].split(", ") if each != "void"]
        assert len(declared) == len(arguments), name
        for prototype, kind in zip(declared, arguments, strict=True):
            wide = "*" in prototype or "size_t" in prototype or "_t comm" in prototype or "Stream_t" in prototype
            if "ncclUniqueId commId" not in prototype:
                assert ctypes.sizeof(kind) == (8 if wide else 4), (name, prototype)


def test_the_layout_of_what_is_handed_over() -> None:
    assert ctypes.sizeof(UniqueId) == 128
    config = NcclConfig.non_blocking()
    assert (
        ctypes.sizeof(NcclConfig) == config.size == 48
        and NcclConfig.blocking.offset == 16
        and NcclConfig.netName.offset == 32
    )
    assert (config.magic, config.version, config.blocking) == (0xCAFEBEEF, 21801, 0)
    assert config.minCTAs == config.splitShare == -(2**31) and config.netName is None


def test_versions_and_their_codes() -> None:
    assert code_of((2, 18, 1)) == 21801 and text_of(23203) == "2.32.3"


def test_factors_are_elements_of_the_type() -> None:
    assert np.frombuffer(library.scalar(0.5, np.dtype(np.float16)), np.float16).tolist() == [0.5]
    assert len(library.scalar(1 / 3, np.dtype(ml_dtypes.bfloat16)).raw) == 2


def test_an_error_is_told_in_the_words_of_nccl() -> None:
    nccl = Nccl(RecordedNccl({}.__getitem__), "recorded")
    with pytest.raises(DeviceFailure, match=r"ncclX: NCCL says 'remote process .* network error' \(code 6\): recorded"):
        nccl.check("ncclX", 6)


def test_a_library_without_a_function_is_too_old() -> None:
    with pytest.raises(OSError, match=r"has no ncclGetVersion: it is older than NCCL 2\.18\.1"):
        Nccl.load(ctypes.util.find_library("m") or "libm.so.6")  # type: ignore[attr-defined]


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(made: SimpleNamespace) -> int:
        made._obj.value = 21703
        return 0

    functions = SimpleNamespace(**{name: lambda *_: 0 for name in library._PROTOTYPES})
    functions.ncclGetVersion = type("F", (), {"__call__": lambda self, made: version(made)})()
    for name in library._PROTOTYPES:
        if name != "ncclGetVersion":
            setattr(functions, name, type("F", (), {"__call__": lambda self, *_: 0})())
    monkeypatch.setattr(ctypes, "CDLL", lambda path: functions)
    monkeypatch.setattr(ctypes, "PyDLL", lambda path: functions)
    with pytest.raises(OSError, match=r"libold is NCCL 2.17.3; 2.18.1 or newer is needed"):
        Nccl.load("libold")


def test_no_library_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", lambda: "")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere/else")
    with pytest.raises(OSError, match="pip install nvidia-nccl-cu12") as error:
        library.loaded()
    assert str(Path(sys.prefix, "lib")) in str(error.value) and "/somewhere/else" in str(error.value)


def test_the_wheel_beside_pytorch_is_found_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl.so.2").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(library, "_in_use", str)  # PyTorch with CUDA may be loaded
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: spec if name == "nvidia.nccl" else None)
    monkeypatch.setattr(library.sys, "prefix", "/conda")
    assert library.find() == str(tmp_path / "lib" / "libnccl.so.2")


@pytest.mark.parametrize("where", ["conda", "LD_LIBRARY_PATH"])
def test_the_library_is_found_where_conda_puts_it_and_where_the_linker_looks(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl.so.2").touch()
    monkeypatch.setattr(library, "_in_use", str)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(library.sys, "prefix", str(tmp_path if where == "conda" else "/nowhere"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere/else:{tmp_path / 'lib'}")
    assert library.find() == str(tmp_path / "lib" / "libnccl.so.2")


def test_the_copy_that_the_process_has_loaded_is_the_one_that_is_found(tmp_path: Path) -> None:
    """As where PyTorch is linked to a library that is in none of the usual places."""
    there = tmp_path / "of pytorch" / "libnccl.so.2"
    there.parent.mkdir()
    math = re.search(r"/\S*/libm\.so\.6", Path("/proc/self/maps").read_text())
    assert math is not None
    shutil.copy(math[0], there)
    script = (
        "import ctypes, sys; from horovod.comm.nccl import library; ctypes.CDLL(sys.argv[1]); print(library.find())"
    )
    done = subprocess.run([sys.executable, "-c", script, str(there)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(there)
