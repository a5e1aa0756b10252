"""What ``horovodrun --mpi`` makes of a request: which MPI is there, and its command line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from horovod.runner.errors import LaunchError, UsageError
from horovod.runner.external.mpi.command import Launch, command_line, variables, without_effect
from horovod.runner.external.mpi.kinds import Mpi, MpiKind, find, recognise

HYDRA = """HYDRA build details:
    Version:                                 5.0.2
    Release Date:                            Fri Sep 25 20:45:26 UTC 2026
    Process Manager:                         pmi
    Launchers available:                     ssh rsh fork slurm ll lsf sge manual persist
"""
INTEL = """Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102 (id: 9279b7d62)
Copyright 2003-2021, Intel Corporation.
"""
OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
SPECTRUM = "mpirun (IBM Spectrum MPI) 10.3.1.02rtm0\n"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (OPEN_MPI_4, MpiKind.OPEN_MPI_4),
        ("mpirun (OpenRTE) 2.1.1\n", MpiKind.OPEN_MPI_4),
        (OPEN_MPI_5, MpiKind.OPEN_MPI_5),
        (SPECTRUM, MpiKind.SPECTRUM),
        (HYDRA, MpiKind.MPICH),
        (INTEL, MpiKind.INTEL),
        ("mpirun: command not found", None),
        ("", None),
    ],
)
def test_an_mpi_is_known_by_what_its_mpirun_says(text: str, kind: MpiKind | None) -> None:
    assert recognise(text) is kind


def fake_mpirun(folder: Path, text: str) -> dict[str, str]:
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_the_mpirun_on_path_is_found(tmp_path: Path) -> None:
    assert find(fake_mpirun(tmp_path, HYDRA)) == Mpi(str(tmp_path / "mpirun"), MpiKind.MPICH)


def test_without_mpirun_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"there is no mpirun on PATH. Install an MPI \(pip install mpich;.*module load"
    ):
        find({"PATH": str(tmp_path)})


def test_an_mpirun_of_an_unknown_kind_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"mpirun belongs to no MPI that horovodrun knows .*its --version prints 'FooMPI 3'"
    ):
        find(fake_mpirun(tmp_path, "\nFooMPI 3"))


COMMAND = ("python", "train.py", "--x", "a b")
HERE = Launch(COMMAND, (("localhost", 4),), elsewhere=False, variables=("A", "_HOROVOD_SECRET_KEY"))
THERE = Launch(
    COMMAND,
    (("hostA", 2), ("hostB", 1)),
    elsewhere=True,
    variables=("A", "_HOROVOD_SECRET_KEY"),
    shell=("ssh", "-o", "BatchMode=yes", "-p", "2222"),
)


def line(kind: MpiKind, launch: Launch) -> str:
    words = command_line(Mpi("mpirun", kind), launch)
    assert tuple(words[-len(COMMAND) :]) == COMMAND
    return " ".join(words[: -len(COMMAND)])


@pytest.mark.parametrize(
    ("kind", "launch", "words"),
    [
        (
            MpiKind.OPEN_MPI_5,
            HERE,
            "--allow-run-as-root --tag-output -np 4 -H localhost:4 --bind-to none --map-by slot",
        ),
        (
            MpiKind.OPEN_MPI_4,
            HERE,
            "--allow-run-as-root --tag-output -np 4 -H localhost:4 --bind-to none --map-by slot",
        ),
        (MpiKind.MPICH, HERE, "-l -np 4 -hosts localhost:4 -bind-to none"),
        (MpiKind.INTEL, HERE, "-l -np 4 -ppn 4 -hosts localhost"),
        (
            MpiKind.OPEN_MPI_5,
            THERE,
            "--allow-run-as-root --tag-output -np 3 -H hostA:2,hostB:1 --bind-to none --map-by slot --prtemca plm_ssh_agent "
            "ssh -o BatchMode=yes -p 2222 -x A -x _HOROVOD_SECRET_KEY",
        ),
        (
            MpiKind.OPEN_MPI_4,
            THERE,
            "--allow-run-as-root --tag-output -np 3 -H hostA:2,hostB:1 --bind-to none --map-by slot --mca plm_rsh_agent "
            "ssh -o BatchMode=yes -p 2222 -x A -x _HOROVOD_SECRET_KEY",
        ),
        (
            MpiKind.SPECTRUM,
            replace(THERE, tcp=True),
            "--allow-run-as-root --tag-output -np 3 -H hostA:2,hostB:1 -bind-to socket -map-by socket -rank-by core -tcp "
            "--mca plm_rsh_agent ssh -o BatchMode=yes -p 2222 -x A -x _HOROVOD_SECRET_KEY",
        ),
        (
            MpiKind.MPICH,
            THERE,
            "-l -np 3 -hosts hostA:2,hostB:1 -bind-to none -launcher ssh -launcher-exec ssh -genvlist A,_HOROVOD_SECRET_KEY",
        ),
        (
            MpiKind.INTEL,
            replace(THERE, hosts=(("hostA", 2), ("hostB", 2))),
            "-l -np 4 -ppn 2 -hosts hostA,hostB -bootstrap ssh -bootstrap-exec ssh -bootstrap-exec-args "
            "-o BatchMode=yes -p 2222 -genvlist A,_HOROVOD_SECRET_KEY",
        ),
    ],
)
def test_each_mpi_has_its_own_command_line(kind: MpiKind, launch: Launch, words: str) -> None:
    assert line(kind, launch) == f"mpirun {words}"


def test_mpich_is_told_the_options_of_ssh_in_its_environment() -> None:
    assert variables(Mpi("mpirun", MpiKind.MPICH), THERE) == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-o BatchMode=yes -p 2222"}
    assert variables(Mpi("mpirun", MpiKind.OPEN_MPI_5), THERE) == {}


@pytest.mark.parametrize("kind", [MpiKind.OPEN_MPI_4, MpiKind.OPEN_MPI_5, MpiKind.MPICH])
def test_an_option_of_ssh_with_a_space_is_refused(kind: MpiKind) -> None:
    spaced = replace(THERE, shell=("ssh", "-o", "ProxyCommand nc x"))
    with pytest.raises(UsageError, match=r"splits the command that reaches other hosts at spaces.*'ProxyCommand nc x'"):
        variables(Mpi("mpirun", kind), spaced)
        command_line(Mpi("mpirun", kind), spaced)


def test_arguments_of_the_users_own_come_last_and_binding_replaces_ours() -> None:
    asked = replace(HERE, binding="--bind-to core", more="-x NAME --mca a 'b c'", reader=2, output="/out")
    words = command_line(Mpi("mpirun", MpiKind.OPEN_MPI_4), asked)
    assert words[7:] == [
        "--bind-to", "core", "--stdin", "2", "--output-filename", "/out", "-x", "NAME", "--mca", "a", "b c", *COMMAND,
    ]  # fmt: skip
    with pytest.raises(UsageError, match="--mpi-args='\"': No closing quotation"):
        command_line(Mpi("mpirun", MpiKind.OPEN_MPI_4), replace(HERE, more='"'))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (MpiKind.OPEN_MPI_4, "--output-filename /out"),
        (MpiKind.OPEN_MPI_5, "--output tag,file=/out/rank"),
        (MpiKind.MPICH, "-outfile-pattern /out/rank.%r.out -errfile-pattern /out/rank.%r.err"),
        (MpiKind.INTEL, "-outfile-pattern /out/rank.%r.out -errfile-pattern /out/rank.%r.err"),
    ],
)
def test_output_goes_to_files_by_each_mpis_own_option(kind: MpiKind, words: str) -> None:
    assert words in line(kind, replace(HERE, output="/out"))


def test_interfaces_are_mpis_too_as_far_as_it_can_be_told() -> None:
    one, two = replace(THERE, interfaces=("eth0",)), replace(THERE, interfaces=("eth0", "ib0"))
    assert "--mca btl_tcp_if_include eth0,ib0" in line(MpiKind.OPEN_MPI_5, two)
    assert "-iface eth0" in line(MpiKind.MPICH, one)
    assert "-iface" not in line(MpiKind.MPICH, two)
    (notice,) = without_effect(Mpi("mpirun", MpiKind.MPICH), two)
    assert "one network interface, not to eth0, ib0" in notice


def test_binding_arguments_are_for_open_mpi() -> None:
    (notice,) = without_effect(Mpi("mpirun", MpiKind.INTEL), replace(HERE, binding="-x"))
    assert notice.startswith("--binding-args has no effect: Intel MPI has other options")
    assert without_effect(Mpi("mpirun", MpiKind.OPEN_MPI_5), replace(HERE, binding="-x")) == []


def test_many_hosts_get_their_daemons_from_one() -> None:
    hosts = tuple((f"h{number}", 1) for number in range(64))
    assert "--mca plm_rsh_no_tree_spawn true --mca plm_rsh_num_concurrent 64" in line(
        MpiKind.OPEN_MPI_4, replace(THERE, hosts=hosts)
    )
    assert "--prtemca plm_ssh_no_tree_spawn true --prtemca plm_ssh_num_concurrent 64" in line(
        MpiKind.OPEN_MPI_5, replace(THERE, hosts=hosts)
    )
    assert "tree_spawn" not in line(MpiKind.OPEN_MPI_5, THERE)


def test_options_that_an_mpi_lacks_are_refused() -> None:
    with pytest.raises(
        UsageError, match="Intel MPI starts the same number of ranks on every host, not hostA:2, hostB:1"
    ):
        line(MpiKind.INTEL, THERE)
    with pytest.raises(UsageError, match="--stdin 1: under MPICH only rank 0 can read standard input"):
        line(MpiKind.MPICH, replace(HERE, reader=1))
