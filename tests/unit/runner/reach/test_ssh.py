"""How other hosts are reached, and what is said when they cannot be."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from horovod.runner.reach.ssh import SshOptions, command_line, explain, options
from horovod.runner.worker_environment import forwarded


@pytest.mark.parametrize(
    ("status", "errors", "told"),
    [
        (255, "ssh: Could not resolve hostname x: Name or service not known\n", "its name is unknown"),
        (255, "ssh: connect to host x port 22: Connection refused\n", "nothing listens at its ssh port"),
        (255, "ssh: connect to host x port 22: No route to host\n", "no route"),
        (255, "ssh: connect to host x port 22: Network is unreachable\n", "no route"),
        (255, "ssh: connect to host x port 22: Connection timed out\n", "it does not answer"),
        (255, "me@x: Permission denied (publickey).\r\n", "it does not accept the key"),
        (255, "Host key verification failed.\r\n", "its host key is not trusted"),
        (255, "@@@\nWARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\n@@@\nHost key verification failed.\n", "ssh-keygen -R"),
        (255, "Timeout, server x not responding.\r\n", "it has not answered for 15 seconds"),
        (127, "no python3 on the PATH\n", "there is no Python"),
        (1, "Traceback\n  ...\nModuleNotFoundError: No module named 'horovod'\n", "Horovod is not installed for its Python"),
        (1, "Traceback\n  ...\nModuleNotFoundError: No module named 'msgspec'\n", "No module named 'msgspec'"),
        (255, "", "it was killed, or the connection broke"),
        (-9, "", "ssh was killed by SIGKILL"),
        (3, "line\nlast\n\n", "ended with exit status 3: last"),
    ],
)  # fmt: skip
def test_why_a_host_cannot_take_part(status: int, errors: str, told: str) -> None:
    assert told in explain(status, errors)
    assert "\n" not in explain(status, errors, "hello\nthere\n")


def test_what_a_login_shell_said_is_quoted_where_nothing_else_is_known() -> None:
    assert explain(1, "", "\nThis account is closed.\n").endswith("its login shell wrote: This account is closed.")


def test_what_the_user_says_about_ssh_comes_first() -> None:
    given = options({"HOROVOD_SSH_COMMAND": "ssh -F 'my config'"}, 2222, "key", 30)
    words = command_line(given, "me@b", "/python", {"PATH": "/bin", "PYTHONPATH": "/a b"})
    assert words[:3] == ["ssh", "-F", "my config"]
    assert words[words.index("-p") + 1] == "2222" and words[words.index("-i") + 1] == "key"
    host, remote = words[-2:]
    assert host == "me@b"
    assert shlex.split(remote)[-3:] == ["/python", "/bin", "/a b"]


def start_agent(python: str, path: Path) -> subprocess.CompletedProcess[str]:
    remote = command_line(options({}, None, None, 30), "b", python, {"PATH": str(path), "PYTHONPATH": "/a b"})[-1]
    environment = {"PATH": "/nowhere"}
    return subprocess.run(["/bin/sh", "-c", remote], env=environment, capture_output=True, text=True)


def test_the_launchers_interpreter_is_taken_else_the_first_python3_on_its_path(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "python3"
    for each in (mine, other):
        each.write_text(f'#!/bin/sh\necho {each.name} "$1" "$PYTHONPATH"\n')
        each.chmod(0o755)
    assert start_agent(str(mine), tmp_path).stdout == "mine -c /a b\n"
    assert start_agent("/no/such/python", tmp_path).stdout == "python3 -c /a b\n"
    other.unlink()
    none = start_agent("/no/such/python", tmp_path)
    assert none.returncode == 127 and "there is no Python" in explain(none.returncode, none.stderr)


def test_an_ssh_command_that_does_not_parse_is_refused() -> None:
    with pytest.raises(ValueError, match="HOROVOD_SSH_COMMAND"):
        options({"HOROVOD_SSH_COMMAND": "ssh 'oops"}, None, None, 30)
    assert options({}, None, None, 30) == SshOptions(("ssh",), None, None, 30)


def test_the_variables_that_other_hosts_get() -> None:
    stays = ["BASH_FUNC_x%%", "OLDPWD", "CUDA_VISIBLE_DEVICES", "MY_CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY", "HOME",
             "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "PWD", "_"]  # fmt: skip
    travels = [
        "PATH",
        "PYTHONPATH",
        "HOROVOD_LOG_LEVEL",
        "NCCL_DEBUG",
        "HOMEBREW",
        "USERS",
        "MY_HOME",
        "LD_LIBRARY_PATH",
    ]
    assert set(forwarded(dict.fromkeys([*stays, *travels], "x"))) == set(travels)


def test_messages_of_ssh_about_working_connections_are_not_quoted() -> None:
    said = "Warning: Permanently added 'hostB' (ED25519) to the list of known hosts.\r\n"
    assert explain(255, said) == "it was killed, or the connection broke"
    assert explain(255, said + "Timeout, server hostB not responding.\r\n") == (
        "it has not answered for 15 seconds (Timeout, server hostB not responding.)"
    )
