"""A flag that is accepted and changes nothing says so, once, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod.runner.arguments import parse
from horovod.runner.output.notices import without_effect


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        ("-p 22", "--ssh-port has no effect: all ranks run on this machine"),
        ("-i key", "--ssh-identity-file has no effect: all ranks run on this machine"),
        ("--jsrun -p 22", "--ssh-port has no effect: jsrun starts the ranks, not ssh"),
        ("--jsrun -i key", "--ssh-identity-file has no effect: jsrun starts the ranks, not ssh"),
        ("--disable-cache", "--disable-cache has no effect: nothing is cached"),
        ("--network-interface lo --network-interfaces lo", "--network-interfaces has no effect: all ranks run on this"),
        ("--mpi-args=-x", "--mpi-args has no effect: horovodrun starts the ranks itself"),
        ("--binding-args=-x", "--binding-args has no effect: horovodrun starts the ranks itself"),
        ("--tcp", "--tcp has no effect: all ranks run on this machine"),
        ("--hierarchical-allreduce", "--hierarchical-allreduce has no effect: all ranks run on this machine"),
        ("--hierarchical-allgather", "--hierarchical-allgather has no effect: all ranks run on this machine"),
        ("--torus-allreduce", "--torus-allreduce has no effect: all ranks run on this machine"),
        ("--num-nccl-streams 2", "--num-nccl-streams has no effect: one stream of each GPU"),
        ("--autotune-log-file x", "--autotune-log-file has no effect: it needs --autotune"),
        ("--autotune-warmup-samples 0", "--autotune-warmup-samples has no effect: it needs --autotune"),
        ("--no-autotune --autotune-log-file x", "--autotune-log-file has no effect: it needs --autotune"),
        ("--timeline-mark-cycles", "--timeline-mark-cycles has no effect: it needs --timeline-filename"),
        ("--no-stall-check --stall-check-warning-time-seconds 3", "--no-stall-check switches the check off"),
        ("--no-stall-check --stall-check-shutdown-time-seconds 3", "--no-stall-check switches the check off"),
    ],
)
def test_a_flag_without_effect(words: str, notice: str) -> None:
    (said,) = without_effect(parse([*words.split(), "-np", "2", "true"]))
    assert notice in said


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--gloo --verbose --start-timeout 9 --output-filename x -prefix-timestamp -H localhost:2",
        "--fusion-threshold-mb 1 --cycle-time-ms 1 --cache-capacity 1 --gloo-timeout-seconds 9 --thread-affinity 0",
        "--no-hierarchical-allreduce --no-hierarchical-allgather --no-torus-allreduce --no-mpi-threads-disable",
        "--timeline-filename t --timeline-mark-cycles --stall-check --stall-check-warning-time-seconds 3",
        "--no-stall-check --no-autotune --no-timeline-mark-cycles --log-level info --log-with-timestamp",
        "--mpi --mpi-args=-x --binding-args=-y",
        "--jsrun --mpi-args=-x --binding-args=-y --tcp",
        "--mpi --tcp",  # of some MPIs it becomes an option, too
        "--autotune --autotune-log-file x",
    ],
)
def test_what_has_an_effect_and_what_asks_for_nothing_is_silent(words: str) -> None:
    assert without_effect(parse([*words.split(), "-np", "2", "true"])) == []


def test_a_setting_of_the_file_says_so_too(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("params: {torus_allreduce: true, hierarchical_allreduce: false}")
    (said,) = without_effect(parse(["--config-file", str(file), "-np", "2", "true"]))
    assert said.startswith("--torus-allreduce has no effect")


def test_what_has_an_effect_on_other_hosts_is_silent_where_there_are_some() -> None:
    words = ["-p", "22", "-i", "key", "--network-interfaces", "lo", "--torus-allreduce", "--tcp"]
    given = parse([*words, "-np", "2", "true"])
    assert without_effect(given, several_hosts=True) == []
