"""A node's address: its name, or what Slurm's configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod.control.slurm_address import address_of


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, output: str, status: int = 0) -> None:
    program = folder / "scontrol"
    program.write_text(
        f'#!/bin/sh\n[ "$*" = "--oneliner show node no.such.invalid" ] || exit 9\n{output}\nexit {status}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_a_name_that_resolves_is_the_address() -> None:
    assert address_of("localhost") == "localhost"


def test_slurm_is_asked_for_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, "echo 'NodeName=x Arch=x86_64 NodeAddr=127.0.0.9 NodeHostName=y'")
    assert address_of("no.such.invalid") == "127.0.0.9"


@pytest.mark.parametrize("output", ["echo Node not found", "echo NodeAddr=no.such.invalid"])
def test_an_unknown_node_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    scontrol(tmp_path, monkeypatch, output, 1)
    with pytest.raises(ValueError, match=r"node no\.such\.invalid does not resolve, and scontrol knows no address"):
        address_of("no.such.invalid")


def test_there_is_no_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="scontrol cannot be asked"):
        address_of("no.such.invalid")
