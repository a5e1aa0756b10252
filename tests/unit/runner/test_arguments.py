"""The command line and the configuration file become one request; what is wrong is refused in one clear line."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import horovod
from horovod._base import config
from horovod._base.config import Config
from horovod.runner import help_text, probes
from horovod.runner.arguments import parse
from horovod.runner.launch import main, run_commandline
from horovod.runner.options import Options
from horovod.runner.signals import ENDING_SIGNALS
from horovod.runner.tunables import TUNABLES, Value, exported
from horovod.runner.worker_environment import from_options


def settings(*words: str) -> dict[str, Value | None]:
    return dict(parse([*words, "true"]).tunables)


def test_nothing_given_is_nothing_set() -> None:
    assert parse([]) == Options()
    assert from_options(parse(["true"])) == {}


def test_the_command_begins_at_the_first_word_that_is_no_flag() -> None:
    options = parse(["-np", "2", "--verbose", "python", "train.py", "--verbose", "-np", "7"])
    assert options.num_proc == 2
    assert options.command == ("python", "train.py", "--verbose", "-np", "7")


@pytest.mark.parametrize(
    "words", [["-np", "2"], ["-np=2"], ["--num-proc", "2"], ["--num-proc=2"], ["--num-p", "2"], ["--num-p=2"]]
)
def test_ways_to_write_a_flag(words: list[str]) -> None:
    options = parse([*words, "--", "echo", "x"])
    assert (options.num_proc, options.command) == (2, ("echo", "x"))


EVERYTHING = """
-np 4 -cb --disable-cache --start-timeout 9 --network-interfaces a,b --network-interface c --output-filename o
--verbose -p 22 -i key --min-np 2 --max-num-proc 8 --slots 4 --elastic-timeout 5 --reset-limit 3
--blacklist-cooldown-range 1 2 -prefix-timestamp -H h:4 --mpi --mpi-args=-x --tcp --binding-args b true
"""


def test_every_flag_of_the_interface() -> None:
    options = parse(EVERYTHING.split())
    assert options == Options(
        command=("true",), num_proc=4, check_build=True, disable_cache=True, start_timeout=9, nics=("a", "b", "c"),
        output_filename="o", verbose=True, ssh_port=22, ssh_identity_file="key", min_num_proc=2, max_num_proc=8,
        slots=4, elastic_timeout=5, reset_limit=3, cooldown_range=(1, 2), prefix_output_with_timestamp=True,
        hosts="h:4", use_mpi=True, mpi_args="-x", tcp_flag=True, binding_args="b",
    )  # fmt: skip
    assert parse(["-hostfile", "f", "--jsrun"]) == Options(hostfile="f", use_jsrun=True)
    assert parse(["--host-discovery-script", "s", "--gloo"]) == Options(host_discovery_script="s", use_gloo=True)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("--fusion-threshold-mb 3", {config.FUSION_THRESHOLD: str(3 << 20)}),
        ("--cycle-time-ms 2.5 --cache-capacity 7", {config.CYCLE_TIME: "2.5", config.CACHE_CAPACITY: "7"}),
        ("--hierarchical-allreduce", {config.HIERARCHICAL_ALLREDUCE: "1"}),
        ("--no-hierarchical-allgather", {config.HIERARCHICAL_ALLGATHER: "0"}),
        ("--torus-allreduce", {config.TORUS_ALLREDUCE: "1"}),
        ("--no-autotune --autotune-log-file x", {}),
        (
            "--autotune --autotune-log-file x --autotune-warmup-samples 1",
            {config.AUTOTUNE: "1", config.AUTOTUNE_LOG: "x", config.AUTOTUNE_WARMUP_SAMPLES: "1"},
        ),
        ("--timeline-mark-cycles", {}),
        ("--timeline-filename t --timeline-mark-cycles", {config.TIMELINE: "t", config.TIMELINE_MARK_CYCLES: "1"}),
        ("--no-stall-check", {config.STALL_CHECK_DISABLE: "1"}),
        ("--stall-check", {config.STALL_CHECK_DISABLE: "0"}),
        ("--stall-check-warning-time-seconds 4", {config.STALL_CHECK_TIME: "4"}),
        ("--thread-affinity 0,2", {config.THREAD_AFFINITY: "0,2"}),
        ("--gloo-timeout-seconds 9", {config.TIMEOUT_SECONDS: "9"}),
        ("--log-level debug --log-without-timestamp", {config.LOG_LEVEL: "DEBUG", config.LOG_HIDE_TIME: "1"}),
        ("--log-with-timestamp", {config.LOG_HIDE_TIME: "0"}),
        ("--log-hide-timestamp", {config.LOG_HIDE_TIME: "1"}),
        ("--tcp --start-timeout 8", {config.NCCL_IB_DISABLE: "1", config.START_TIMEOUT: "8"}),
        (
            "--network-interfaces a,b",
            {
                config.NETWORK_INTERFACE: "a",
                config.NETWORK_INTERFACES: "a,b",
                config.NCCL_SOCKET_INTERFACE: "a,b",
            },
        ),
    ],
)
def test_what_flags_tell_the_runtime(words: str, variables: dict[str, str]) -> None:
    assert from_options(parse([*words.split(), "true"])) == variables


def in_file(folder: Path, text: str) -> str:
    file = folder / "settings.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_can_say_what_flags_say(tmp_path: Path) -> None:
    file = in_file(
        tmp_path,
        "controller: gloo\n"
        "params: {fusion_threshold_mb: 32, cycle_time_ms: 5, hierarchical_allreduce: true}\n"
        "autotune: {enabled: true, gaussian_process_noise: 0.5}\n"
        "stall_check: {enabled: false}\n"
        "library_options: {thread_affinity: [0, 1]}\n"
        "logging: {level: info, with_timestamp: false}\n"
        "timeline:\n",
    )
    assert parse(["--config-file", file]).use_gloo
    assert settings("--config-file", file) == {
        "fusion_threshold_mb": 32,
        "cycle_time_ms": 5.0,
        "hierarchical_allreduce": True,
        "autotune": True,
        "autotune_gaussian_process_noise": 0.5,
        "no_stall_check": True,
        "thread_affinity": "0,1",
        "log_level": "INFO",
        "log_with_timestamp": False,
    }


def test_the_command_line_beats_the_file_wherever_it_stands(tmp_path: Path) -> None:
    file = in_file(tmp_path, "params: {cache_capacity: 5, torus_allreduce: true}\ncontroller: mpi\n")
    for words in (["--cache-capacity", "9", "--config-file", file], ["--config-file", file, "--cache-capacity", "9"]):
        assert settings(*words, "--no-torus-allreduce") == {"cache_capacity": 9, "torus_allreduce": False}
    options = parse(["--config-file", file, "--gloo"])
    assert options.use_gloo and not options.use_mpi


def test_every_setting_has_a_place_in_the_file_and_a_variable_of_its_own() -> None:
    assert len({tunable.yaml_key for tunable in TUNABLES}) == len(TUNABLES)
    assert len({tunable.variable for tunable in TUNABLES}) == len(TUNABLES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: [", "not valid YAML"),
        ("just text", "must hold sections"),
        ("parms: {}", "unknown section 'parms'"),
        ("params: {speed: 9}", "unknown setting 'speed' in section 'params'"),
        ("params: 9", "section 'params' must hold settings"),
        ("params: {cache_capacity: many}", "params.cache_capacity: expected a whole number, not 'many'"),
        ("params: {cache_capacity: true}", "expected a whole number"),
        ("params: {cache_capacity: -1}", r"params.cache_capacity=-1 must be >= 0"),
        ("autotune: {gaussian_process_noise: 1.5}", r"must be in \[0, 1\]"),
        ("logging: {level: loud}", "must be one of TRACE"),
        ("controller: smoke", "No such controller supported: smoke"),
        ("x: !!python/object/apply:os.system [ls]", "not valid YAML"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(["--config-file", in_file(tmp_path, text)])


def test_a_missing_file() -> None:
    with pytest.raises(ValueError, match="/no/such/file: No such file"):
        parse(["--config-file", "/no/such/file"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no command given"),
        ("-np 2", "no command given"),
        ("true", "the number of ranks is missing"),
        ("-np 0 true", "must be at least 1, not 0"),
        ("-np -3 true", "must be at least 1, not -3"),
        ("-np two true", "argument -np/--num-proc: must be a whole number, not 'two'"),
        ("-np 2 -p 99999 true", "must be the number of a port, at most 65535, not 99999"),
        ("-np two true", "'two'"),
        ("-np 99999999999999999999 true", "at most 65536"),
        ("-np", "expected one argument"),
        ("-np 3 -H localhost:2 true", "Requested more processes (3) than there are available slots (2)"),
        ("-np 2 -H localhost true", "invalid host 'localhost'"),
        ("-np 2 --hostfile /no/such/file true", "cannot read the hostfile /no/such/file"),
        ("-np 2 -H localhost:2 --hostfile x true", "not allowed with argument"),
        ("-np 2 no-such-command --x", "command not found: no-such-command"),
        ("-np 2 /no/such/command", "command not found: /no/such/command"),
        ("-np 2 /etc", "command is a directory: /etc"),
        ("-np 2 --verbose=1 true", "--verbose takes no value, but was given '1'"),
        ("-np 2 /etc/passwd", "command is not executable: /etc/passwd"),
        ("--nonsense 1 -np 2 true", "unknown flag --nonsense"),
        ("-q -np 2 true", "unknown flag -q. Flags of your own program"),
        ("-np2 true", "unknown flag -np2, did you mean -np?"),
        ("-np 2 --fusion-treshold-mb 3 true", "did you mean --fusion-threshold-mb?"),
        ("-np 2 --hierarchical true", "ambiguous"),
        ("-np 2 --gloo --mpi true", "not allowed with argument"),
        ("-np 2 --autotune --no-autotune true", "not allowed with argument"),
        ("-np 2 --log-with-timestamp --prefix-output-with-timestamp true", "not allowed with argument"),
        ("-np 2 --cycle-time-ms -1 true", "must be >= 0"),
        ("-np 2 --thread-affinity x true", "core number"),
        ("-np 2 --start-timeout 0 true", "at least 1"),
        ("-np 2 --network-interfaces a,,b true", "empty name"),
        ("-np 2 --network-interface no-such-nic true", "no network interface no-such-nic"),
        ("-np 2 --output-filename /proc/nothing true", "cannot write output to /proc/nothing"),
        ("-np 2 --jsrun true", "Horovod did not detect an LSF job"),
        ("-np 2 --max-np 3 true", "--max-np is for elastic jobs; give --min-np or --host-discovery-script with it"),
        ("-np 2 --host-discovery-script no-such-program true", "ended with exit status 127"),
        ("-np 2 --min-np 3 true", "-np (2) must be at least --min-np (3)"),
        ("--min-np 2 --mpi true", "--mpi cannot start elastic jobs"),
        ("--min-np 2 --stdin 0 true", "--stdin cannot be given for an elastic job"),
        ("--min-np 2 --blacklist-cooldown-range 9 2 true", "give the shortest and the longest time"),
    ],
)
def test_a_wrong_argument_prints_one_line_and_the_usage(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:  # which the parser raises, too
        run_commandline(words.split())
    status: Any = end.value.code
    told = capsys.readouterr()
    usage, error = told.err.strip().splitlines()
    assert status == 2
    assert usage.startswith("usage: horovodrun -np N")
    assert error.startswith("horovodrun: error: ")
    assert message in error
    assert told.out == ""


@pytest.mark.parametrize(
    ("command", "message"),
    [("python train.py", "command not found: python train.py; write it without quotes"), ("", "command not found: ''")],
)
def test_a_command_that_is_no_word(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_commandline(["-np", "2", command])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "./", "/absolute/"])
def test_a_script_that_is_no_command_gets_a_hint(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "train.py"
    Path(script).write_text("")
    word = str(tmp_path / script) if folder == "/absolute/" else folder + script
    with pytest.raises(ValueError, match="did you mean"):
        run_commandline(["-np", "1", word])
    assert re.search(rf"did you mean `python\S* {word}`\?", capsys.readouterr().err)


@pytest.fixture
def handlers() -> Iterator[None]:
    """The program ignores signals at its end."""
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_the_program_ends_with_a_status_where_its_python_function_raises(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs: list[tuple[list[str], int, type[Exception], str]] = [
        (["-np", "1", "sh", "-c", "exit 3"], 3, RuntimeError, "Exit code: 3"),
        (["-np", "1", "no-such-program"], 2, ValueError, "command not found: no-such-program"),
    ]
    for arguments, status, kind, text in jobs:
        with pytest.raises(kind, match=text) as caught:
            run_commandline(arguments)
        assert isinstance(caught.value, SystemExit) and caught.value.code == status  # for who does not catch it
        monkeypatch.setattr("sys.argv", ["horovodrun", *arguments])
        assert main() == status
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "1", "true"])
    assert (main(), run_commandline()) == (0, 0)
    assert "Exit code: 3" in capfd.readouterr().err


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_the_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_commandline([flag])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == horovod.build_info()["version"]


def shown(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        run_commandline([flag])
    assert end.value.code == 0
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def test_the_help_shows_flags_that_are_often_used_and_names_the_other_help(capsys: pytest.CaptureFixture[str]) -> None:
    brief, full = shown("--help", capsys), shown("--help-all", capsys)
    for flag in help_text.OFTEN:
        assert re.search(rf" {flag}[ ,]", brief) and re.search(rf" {flag}[ ,]", full)
    assert "--help-all lists every flag" in brief
    assert "--cache-capacity" not in brief and "batches and engines" not in brief
    assert len(brief) < 0.6 * len(full)


def test_the_whole_help_has_every_flag_with_its_default_and_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    full = shown("--help-all", capsys)
    for tunable in TUNABLES:
        if not tunable.on_hidden:
            assert f" {tunable.flag} " in full
            assert re.search(rf" {tunable.flag} .*?{tunable.variable}\b", full)
    for words in (
        "MiB; 0 turns batching off (default: 128; HOROVOD_F",
        "is reported (default: 60; ",
        "milliseconds (default: 0; ",
    ):
        assert words in full
    for flag in ("--slots-per-host N", "--mpi-args ARGS", "--no-torus-allreduce", "--stdin RANK"):
        assert flag in full


def test_defaults_in_the_help_are_those_of_the_runtime() -> None:
    """What is said to be the default has the same effect as no flag."""
    for tunable in TUNABLES:
        default = help_text.default_of(tunable)
        if default:
            variables = exported({tunable.name: tunable.check(tunable.kind(default), tunable.flag)})
            assert Config.from_env(variables) == Config.from_env({}), tunable.name


def test_check_build_needs_no_np(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SECONDS", 60.0)  # of a machine that is busy
    real = probes.framework

    def framework(module: str, *words: str) -> probes.ProbeResult:
        """Of TensorFlow and Keras the import takes long; that of PyTorch is tried."""
        return real("json", "", "") if module in ("tensorflow", "keras") else real(module, *words)

    monkeypatch.setattr(probes, "framework", framework)
    assert run_commandline(["--check-build"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Horovod v{horovod.__version__}:\n\nAvailable Frameworks:\n    [")
    for line in ("Available Controllers:", "Available Tensor Operations:"):
        assert f"\n\n{line}\n" in text
    assert "[X] Gloo" in text.split("Operations")[0]
    assert "[X] TensorFlow" in text
    rows = [line for line in text.splitlines() if line.startswith("    ")]
    assert all(re.fullmatch(r"    \[[X ]\] \S.*", row) for row in rows)
