"""Every setting is read from its variable; what does not parse is an error that names the variable and the value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod._base import config
from horovod._base.config import Config

SETTINGS: list[tuple[str, str, str, Any]] = [
    (config.FUSION_THRESHOLD, "1048576", "fusion_threshold", 1 << 20),
    (config.FUSION_THRESHOLD, "0", "fusion_threshold", 0),
    (config.CYCLE_TIME, "2.5", "cycle_time", timedelta(milliseconds=2.5)),
    (config.CYCLE_TIME, "0", "cycle_time", timedelta(0)),
    (config.CACHE_CAPACITY, "7", "cache_capacity", 7),
    (config.CACHE_CAPACITY, "0", "cache_capacity", 0),
    (config.RELAY_THRESHOLD, "0", "relay_threshold", 0),
    (config.DISABLE_GROUP_FUSION, "1", "disable_group_fusion", True),
    (config.DYNAMIC_PROCESS_SETS, "1", "dynamic_process_sets", True),
    (config.CPU_OPERATIONS, " TCP ", "cpu_operations", "tcp"),
    (config.GPU_OPERATIONS, " NCCL ", "gpu_operations", "nccl"),
    (config.GPU_OPERATIONS, " HOST ", "gpu_operations", "host"),
    (config.HIERARCHICAL_ALLREDUCE, "1", "hierarchical_allreduce", True),
    (config.HIERARCHICAL_ALLREDUCE, "0", "hierarchical_allreduce", False),
    (config.COMPRESSION, "INT8", "compression", "int8"),
    (config.COMPRESSION, "none", "compression", ""),
    (config.TORUS_ALLREDUCE, "1", "hierarchical_allreduce", True),
    (config.HIERARCHICAL_ALLGATHER, "0", "hierarchical_allgather", False),
    (config.MPI_THREADS_DISABLE, "1", "mpi_threads_disable", True),
    (config.NETWORK_INTERFACE, "eth0", "network_interfaces", "eth0"),
    (config.NETWORK_INTERFACES, "eth0,ib0", "network_interfaces", "eth0,ib0"),
    (config.SHM_PIECE_BYTES, "65536", "shm_piece_bytes", 65536),
    (config.SHM_DIRECT, "Never", "shm_direct", "never"),
    (config.BUCKET_BYTES, "1", "bucket_bytes", 1),
    (config.DDP_IN_PLACE, "0", "ddp_in_place", False),
    (config.ON_LOSS, "Continue", "on_loss", "continue"),
    (config.CHECK, "Error", "check", "error"),
    (config.THREAD_AFFINITY, "0,2,4", "thread_affinity", (0, 2, 4)),
    (config.STRAGGLER_PERCENT, "25", "straggler_percent", 25.0),
    (config.THREAD_AFFINITY, "3", "thread_affinity", (3,)),
    (config.START_TIMEOUT, "600", "start_timeout", timedelta(minutes=10)),
    (config.TIMEOUT_SECONDS, "1.5", "timeout", timedelta(seconds=1.5)),
    (config.NCCL_TIMEOUT, "90", "nccl_timeout", timedelta(seconds=90)),
    (config.NCCL_START_TIMEOUT, "60", "nccl_start_timeout", timedelta(minutes=1)),
    (config.STALL_CHECK_DISABLE, "1", "stall_check", False),
    (config.STALL_CHECK_DISABLE, "0", "stall_check", True),
    (config.STALL_CHECK_TIME, "5", "stall_warning_time", timedelta(seconds=5)),
    (config.STALL_SHUTDOWN_TIME, "90", "stall_shutdown_time", timedelta(seconds=90)),
    (config.DEADLOCK_TIME, "90", "deadlock_time", timedelta(seconds=90)),
    (config.ELASTIC, "1", "elastic", True),
    (config.TIMELINE, " /tmp/Timeline.json ", "timeline", "/tmp/Timeline.json"),
    (config.TIMELINE_MARK_CYCLES, "1", "timeline_mark_cycles", True),
    (config.DEBUG, "1", "debug", True),
    (config.DEBUG_STEPS, "7", "debug_steps", 7),
    (config.METRICS, "9400", "metrics", "9400"),
    (config.TIMELINE_ALL_RANKS, "1", "timeline_all_ranks", True),
    (config.FLIGHT_RECORDER_SIZE, "10", "flight_recorder_size", 10),
    (config.FLIGHT_RECORDER_DIR, "/tmp/Recorders", "flight_recorder_dir", "/tmp/Recorders"),
    (config.LOG_LEVEL, " Debug ", "log_level", "debug"),
    (config.LOG_HIDE_TIME, "1", "log_hide_time", True),
    (config.AUTOTUNE, "1", "autotune", True),
    (config.AUTOTUNE_LOG, "/tmp/Trials.csv", "autotune_log", "/tmp/Trials.csv"),
    (config.AUTOTUNE_WARMUP_SAMPLES, "0", "autotune_warmup", 0),
    (config.AUTOTUNE_STEPS_PER_SAMPLE, "5", "autotune_steps", 5),
    (config.AUTOTUNE_MAX_SAMPLES, "40", "autotune_trials", 40),
    (config.AUTOTUNE_NOISE, "0.1", "autotune_noise", 0.1),
    (config.AUTOTUNE_FILE, "/tmp/Choice.json", "autotune_file", "/tmp/Choice.json"),
]

NUMBERS = [
    config.FUSION_THRESHOLD,
    config.CYCLE_TIME,
    config.CACHE_CAPACITY,
    config.RELAY_THRESHOLD,
    config.SHM_PIECE_BYTES,
    config.BUCKET_BYTES,
    config.ON_LOSS,
    config.CHECK,
    config.THREAD_AFFINITY,
    config.START_TIMEOUT,
    config.TIMEOUT_SECONDS,
    config.NCCL_TIMEOUT,
    config.NCCL_START_TIMEOUT,
    config.STALL_CHECK_TIME,
    config.STALL_SHUTDOWN_TIME,
    config.DEADLOCK_TIME,
    config.FLIGHT_RECORDER_SIZE,
    config.AUTOTUNE_WARMUP_SAMPLES,
    config.AUTOTUNE_STEPS_PER_SAMPLE,
    config.AUTOTUNE_MAX_SAMPLES,
    config.AUTOTUNE_NOISE,
]
FLAGS = [
    config.DISABLE_GROUP_FUSION,
    config.DDP_IN_PLACE,
    config.DYNAMIC_PROCESS_SETS,
    config.STALL_CHECK_DISABLE,
    config.ELASTIC,
]
ON = {config.DDP_IN_PLACE}
"""The flags that are set by default."""
FLAGS += [config.MPI_THREADS_DISABLE]
FLAGS += [config.DEBUG, config.TIMELINE_MARK_CYCLES, config.TIMELINE_ALL_RANKS, config.LOG_HIDE_TIME, config.AUTOTUNE]


@pytest.mark.parametrize(("variable", "text", "field", "value"), SETTINGS)
def test_each_variable_sets_its_field_and_no_other(variable: str, text: str, field: str, value: Any) -> None:
    found = Config.from_env({variable: text})
    assert getattr(found, field) == value
    assert dataclasses.replace(found, **{field: getattr(Config(), field)}) == Config()


def test_every_field_is_covered() -> None:
    covered = {field for _, _, field, _ in SETTINGS} | {"explicit"}
    assert covered == {field.name for field in dataclasses.fields(Config)}


def test_what_the_user_has_set_is_known() -> None:
    env = {config.FUSION_THRESHOLD: "0", config.BUCKET_BYTES: " ", config.TORUS_ALLREDUCE: "1", "PATH": "/bin"}
    assert Config.from_env(env).explicit == {config.FUSION_THRESHOLD, config.HIERARCHICAL_ALLREDUCE}


def test_defaults() -> None:
    default = Config.from_env({})
    assert default == Config()
    assert default.fusion_threshold == 128 << 20
    assert default.cycle_time == timedelta(0)
    assert default.cache_capacity == 1024
    assert default.stall_check
    assert default.stall_warning_time == timedelta(seconds=60)
    assert default.stall_shutdown_time == default.stall_limit == timedelta(0)


@pytest.mark.parametrize("variable", NUMBERS + FLAGS)
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_variable_is_as_good_as_none(variable: str, text: str) -> None:
    assert Config.from_env({variable: text}) == Config()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CACHE_CAPACITY, "11")
    assert Config.from_env().cache_capacity == 11


@pytest.mark.parametrize("text", ["1", "2", "-1", "true", "YES", "On"])
@pytest.mark.parametrize("variable", FLAGS)
def test_flags_that_are_set(variable: str, text: str) -> None:
    assert (Config.from_env({variable: text}) == Config()) == (variable in ON)


@pytest.mark.parametrize("text", ["0", "00", "false", "No", "OFF", "", " "])
@pytest.mark.parametrize("variable", FLAGS)
def test_flags_that_are_not(variable: str, text: str) -> None:
    assert (Config.from_env({variable: text}) != Config()) == (variable in ON and bool(text.strip()))


def test_every_flag_is_tested() -> None:
    flags = {field.name for field in dataclasses.fields(Config) if field.type == "bool"}
    assert {field for variable, _, field, _ in SETTINGS if variable in FLAGS} == flags


@pytest.mark.parametrize("variable", [config.HIERARCHICAL_ALLREDUCE, config.HIERARCHICAL_ALLGATHER])
def test_flags_that_leave_the_choice_where_they_are_not_set(variable: str) -> None:
    chosen = [Config.from_env({variable: text}).common()[variable] for text in ("yes", "0", "")]
    assert chosen == ["1", "0", "None"]


def test_the_torus_is_another_name_for_the_steps_of_an_allreduce() -> None:
    assert Config.from_env({config.TORUS_ALLREDUCE: "0"}) == Config()
    both = {config.TORUS_ALLREDUCE: "1", config.HIERARCHICAL_ALLREDUCE: "0"}
    assert Config.from_env(both).hierarchical_allreduce is False


def refuse(env: Mapping[str, str], advice: str = "") -> None:
    ((variable, text),) = env.items()
    with pytest.raises(ValueError) as caught:
        Config.from_env(env)
    assert variable in str(caught.value)
    assert repr(text.strip()) in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.parametrize("variable", NUMBERS + FLAGS)
@pytest.mark.parametrize("text", ["many", "1 2", "0x10", "1,", "None", "--1"])
def test_what_is_no_number_is_refused(variable: str, text: str) -> None:
    refuse({variable: text}, "Correct it or unset it")


@pytest.mark.parametrize("variable", NUMBERS)
@pytest.mark.parametrize("text", ["-1", "-0.5", "nan", "inf", "-inf", "1e999"])
def test_numbers_outside_their_limits_are_refused(variable: str, text: str) -> None:
    refuse({variable: text})


@pytest.mark.parametrize(
    ("variable", "text", "advice"),
    [
        (config.SHM_PIECE_BYTES, "4095", "at least 4096"),
        (config.SHM_DIRECT, "1", "auto, always or never"),
        (config.BUCKET_BYTES, "0", "at least 1"),
        (config.START_TIMEOUT, "0.9", "at least 1"),
        (config.TIMEOUT_SECONDS, "0", "at least 1"),
        (config.FUSION_THRESHOLD, "1.5", "whole number"),
        (config.CACHE_CAPACITY, "1e3", "whole number"),
        (config.THREAD_AFFINITY, "0,,1", "whole number"),
        (config.STALL_CHECK_TIME, "soon", "expected a number"),
        (config.ELASTIC, "maybe", "0 or 1"),
        (config.CONTROLLER, "mpi", "use gloo"),
        (config.CONTROLLER, "NCCL", "use gloo"),
    ],
)
def test_the_error_says_what_is_expected(variable: str, text: str, advice: str) -> None:
    refuse({variable: text}, advice)


@given(st.integers(0, 1 << 62))
def test_any_whole_number_of_bytes(number: int) -> None:
    assert Config.from_env({config.FUSION_THRESHOLD: f" {number} "}).fusion_threshold == number


@given(st.floats(1, 1e6))
def test_any_number_of_seconds(seconds: float) -> None:
    assert Config.from_env({config.START_TIMEOUT: repr(seconds)}).start_timeout == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["1e300", "3e9", "99999999999"])
@pytest.mark.parametrize(
    ("variable", "field"),
    [
        (config.START_TIMEOUT, "start_timeout"),
        (config.TIMEOUT_SECONDS, "timeout"),
        (config.STALL_CHECK_TIME, "stall_warning_time"),
        (config.STALL_SHUTDOWN_TIME, "stall_shutdown_time"),
        (config.DEADLOCK_TIME, "deadlock_time"),
        (config.CYCLE_TIME, "cycle_time"),
    ],
)
def test_for_ever_is_as_long_as_the_kernel_can_sleep(variable: str, field: str, text: str) -> None:
    milliseconds = getattr(Config.from_env({variable: text}), field) / timedelta(milliseconds=1)
    assert timedelta(days=1) / timedelta(milliseconds=1) < milliseconds < 2**31


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
def test_any_list_of_cores(cores: list[int]) -> None:
    assert Config.from_env({config.THREAD_AFFINITY: ", ".join(map(str, cores))}).thread_affinity == tuple(cores)


@given(st.sampled_from(NUMBERS + FLAGS), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_text_is_a_value_or_an_error_that_names_it(variable: str, text: str) -> None:
    try:
        Config.from_env({variable: text})
    except ValueError as error:
        assert variable in str(error)


def test_variables_have_names_of_their_own() -> None:
    names = [value for name, value in vars(config).items() if name.isupper() and isinstance(value, str)]
    assert len(names) == len(set(names)) > 40


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().cache_capacity = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({config.STALL_SHUTDOWN_TIME: "90"}, 90),
        ({config.STALL_SHUTDOWN_TIME: "60"}, 60),
        ({config.STALL_SHUTDOWN_TIME: "59"}, 0),
        ({config.STALL_SHUTDOWN_TIME: "90", config.STALL_CHECK_DISABLE: "1"}, 0),
    ],
)
def test_for_how_long_a_rank_is_waited_for(settings: dict[str, str], limit: int) -> None:
    assert Config.from_env(settings).stall_limit == timedelta(seconds=limit)


@pytest.mark.parametrize(
    ("first", "every", "used"),
    [
        ("eth0", "eth0,ib0", "eth0,ib0"),
        ("", "eth0,ib0", "eth0,ib0"),
        ("lo", "eth0,ib0", "lo"),
        ("eth0,ib0", "", "eth0,ib0"),
    ],
    ids=["the launcher's", "only ours", "the script has chosen another", "set by hand"],
)
def test_a_rank_uses_all_interfaces_of_the_launcher_unless_the_script_has_chosen_another(
    first: str, every: str, used: str
) -> None:
    env = {config.NETWORK_INTERFACE: first, config.NETWORK_INTERFACES: every}
    assert Config.from_env(env).network_interfaces == used
