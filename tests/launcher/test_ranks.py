"""What each rank is told, and what is kept from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.harness import Launcher

SHOW = "echo $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE" + (
    " $HOROVOD_CROSS_RANK/$HOROVOD_CROSS_SIZE $HOROVOD_HOSTNAME"
)


def words(text: str) -> list[str]:
    return sorted(line.partition(":")[2] for line in text.splitlines())


def test_ranks_know_their_ranks_and_hosts(launcher: Launcher) -> None:
    done = launcher.run("-np", "3", "-H", "localhost:2,127.0.0.1:2", "sh", "-c", SHOW)
    assert words(done.stdout) == ["0/3 0/2 0/2 localhost", "1/3 1/2 0/1 localhost", "2/3 0/1 1/2 127.0.0.1"]


def test_slots_beyond_np_stay_empty(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "-H", "localhost:4", "sh", "-c", SHOW)
    assert words(done.stdout) == ["0/2 0/2 0/1 localhost", "1/2 1/2 0/1 localhost"]


def test_a_hostfile_says_where(launcher: Launcher, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("\nlocalhost slots=2  # here\n\n")
    done = launcher.run("-np", "2", "--hostfile", hostfile, "sh", "-c", SHOW)
    assert words(done.stdout) == ["0/2 0/2 0/1 localhost", "1/2 1/2 0/1 localhost"]


def test_ranks_inherit_the_whole_environment(launcher: Launcher) -> None:
    show = "echo $MINE,$HOROVOD_CPU_OPERATIONS,$HOROVOD_CONTROLLER,$PYTHONUNBUFFERED"
    done = launcher.run("-np", "1", "sh", "-c", show, MINE="yes")
    assert words(done.stdout) == ["yes,,,1"]


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"])
def test_ranks_compute_on_the_cards_that_the_user_picked(launcher: Launcher, name: str) -> None:
    done = launcher.run("-np", "2", "sh", "-c", f"echo ${name}", **{name: "2,3"})
    assert words(done.stdout) == ["2,3", "2,3"]


def test_a_job_inside_a_job_has_its_own_secret(launcher: Launcher) -> None:
    inner = 'python -m horovod.runner.launch -np 1 sh -c "echo inner \\$_HOROVOD_SECRET_KEY \\$HOROVOD_SIZE"'
    done = launcher.run(
        "-np",
        "2",
        "sh",
        "-c",
        f"if [ $HOROVOD_RANK = 0 ]; then echo outer $_HOROVOD_SECRET_KEY $HOROVOD_SIZE; {inner}; fi",
    )
    (outer,) = [line.split()[-2:] for line in done.stdout.splitlines() if "outer" in line]
    (nested,) = [line.split()[-2:] for line in done.stdout.splitlines() if "inner" in line]
    assert (outer[1], nested[1]) == ("2", "1")
    assert outer[0] != nested[0]


@pytest.mark.parametrize(
    ("extra", "expected"), [({}, r"1 1"), ({"OMP_NUM_THREADS": "5"}, "5 "), ({"MKL_NUM_THREADS": "3"}, " 3")]
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(
    launcher: Launcher, extra: dict[str, str], expected: str
) -> None:
    done = launcher.run("-np", "64", "sh", "-c", 'echo "$OMP_NUM_THREADS $MKL_NUM_THREADS"', **extra)
    assert set(words(done.stdout)) == {expected}


def test_flags_and_file_reach_the_runtime_and_flags_win(launcher: Launcher, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("params:\n  fusion_threshold_mb: 32\n  cycle_time_ms: 5\nstall_check:\n  enabled: false\n")
    done = launcher.run(
        "--fusion-threshold-mb", "2", "-np", "1", "--config-file", settings, "--start-timeout", "44",
        "sh", "-c", "echo $HOROVOD_FUSION_THRESHOLD $HOROVOD_CYCLE_TIME $HOROVOD_STALL_CHECK_DISABLE $HOROVOD_START_TIMEOUT",
    )  # fmt: skip
    assert words(done.stdout) == ["2097152 5.0 1 44"]
