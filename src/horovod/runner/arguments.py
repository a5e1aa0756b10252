"""The command line of ``horovodrun``: parsed into :class:`Options`.

A flag overrides the same setting of the YAML file. Everything after the first argument that is not a flag belongs to the
user's program and is not parsed.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any

from horovod._base import config
from horovod._base.version import VERSION
from horovod.runner import help_text
from horovod.runner.errors import UsageError
from horovod.runner.options import Options
from horovod.runner.output.standard_input import NO_RANK
from horovod.runner.tunables import TUNABLES, Tunable, Value


def parse(arguments: Sequence[str]) -> Options:
    """Read a command line.

    Raises:
        ValueError: an argument or the configuration file is wrong.
        SystemExit: help or the version was asked for, and is printed; or argparse found an error, with status 2.
    """
    parser = build_parser()
    head, command = split_command(parser, arguments)
    given: dict[str, Any] = vars(parser.parse_args(head))
    _translate_old_flags(given)
    settings: dict[str, Value | None] = {}
    if "config_file" in given:
        from horovod.runner.config_file import read_config_file

        controller, found = read_config_file(given["config_file"])
        settings.update(found)
        if controller and not {"use_gloo", "use_mpi", "use_jsrun"} & given.keys():
            given["use_" + controller] = True
    for tunable in TUNABLES:
        if tunable.name in given:
            settings[tunable.name] = tunable.check(given.pop(tunable.name), tunable.flag)
    given["nics"] = tuple(dict.fromkeys(nic for group in given.get("nics", []) for nic in group))
    if "cooldown_range" in given:
        given["cooldown_range"] = tuple(given["cooldown_range"])
    return Options(command=tuple(command), tunables=settings, **given)


def split_command(parser: Parser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the launcher's own arguments and the user's command.

    argparse's REMAINDER would take the argument after a misspelt flag for the command, and report the wrong argument.
    """
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return list(arguments[:position]), list(arguments[position + 1 :])
        if not argument.startswith("-") or argument == "-":
            break
        position += 1 + parser.values_of(argument)
    return list(arguments[:position]), list(arguments[position:])


class Parser(argparse.ArgumentParser):
    """argparse, which also knows how many arguments each flag takes.

    Args:
        brief: show only the flags that are often used.
    """

    def __init__(self, brief: bool) -> None:
        super().__init__(
            prog="horovodrun",
            usage=help_text.USAGE,
            description="Runs a command as several ranks of one distributed job. Arguments after the command belong to it.",
            epilog=f"{help_text.EXAMPLES}\n{help_text.MORE}" if brief else help_text.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps the lines of the examples
            argument_default=argparse.SUPPRESS,
        )
        self._brief = brief
        self._arity: dict[str, int] = {"-h": 0, "--help": 0}

    def flag(self, group: argparse._ActionsContainer, *names: str, **details: Any) -> None:
        if self._brief and help_text.OFTEN.isdisjoint(names):
            details["help"] = argparse.SUPPRESS
        action = group.add_argument(*names, **details)
        count = 1 if action.nargs is None else int(action.nargs)
        self._arity.update(dict.fromkeys(names, count))

    def values_of(self, argument: str) -> int:
        """How many of the arguments that follow the flag ``argument`` are its values.

        Raises:
            ValueError: there is no such flag, or it takes no value and has one.
        """
        name, equals, value = argument.partition("=")
        if equals and self._arity.get(name) == 0:
            raise UsageError(f"{name} takes no value, but was given {value!r}")
        if name in self._arity:
            return 0 if equals else self._arity[name]
        if name.startswith("--"):  # a unique prefix of a long flag is enough
            full = [known for known in self._arity if known.startswith(name)]
            if full:
                return 0 if equals else self._arity[full[0]]
        elif argument[:2] in self._arity and not argument.startswith("--"):
            return 0  # the value is joined, as in -p22
        near = difflib.get_close_matches(name, self._arity, n=1)
        hint = f", did you mean {near[0]}?" if near else "."
        raise UsageError(
            f"unknown flag {argument}{hint} Flags of your own program belong after its name (see horovodrun --help)"
        )


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
    return value


def _positive(text: str) -> int:
    return _whole(text, 1)


def _not_negative(text: str) -> int:
    return _whole(text, 0)


def _port(text: str) -> int:
    value = _whole(text, 1)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"must be the number of a port, at most 65535, not {value}")
    return value


def _rank_or_none(text: str) -> int:
    if text.lower() == "none":
        return NO_RANK
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be the number of one rank, or none, not {text!r}")
    return int(text)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} holds an empty name")
    return names


class _HelpAll(argparse.Action):
    """Shows every flag, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        build_parser(brief=False).print_help()
        parser.exit()


def build_parser(brief: bool = True) -> Parser:
    """The parser. ``brief`` changes only its help: that of ``--help``, or of ``--help-all`` if False."""
    parser = Parser(brief)
    flag = parser.flag
    flag(parser, "--help-all", action=_HelpAll, nargs=0,
         help="show every flag with its default and environment variable, and exit")  # fmt: skip
    flag(parser, "-v", "--version", action="version", version=VERSION, help="show the version, and exit")
    flag(parser, "-cb", "--check-build", action="store_true", dest="check_build",
         help="show which frameworks and engines can be used, and exit")  # fmt: skip
    flag(parser, "--check-gpu", action="store_true", dest="check_gpu",
         help="try PyTorch, NCCL and Horovod on the GPUs of this machine, for five minutes at most, write a report, and "
              "exit")  # fmt: skip
    flag(parser, "-np", "--num-proc", type=_positive, dest="num_proc", metavar="N", help="number of ranks to run")
    flag(parser, "--verbose", action="store_true",
         help="before the ranks start, print to stderr what starts on which host")  # fmt: skip
    flag(parser, "--dry-run", action="store_true",
         help="print what would start on which host, and exit; contacts no host")  # fmt: skip
    flag(parser, "--dump", metavar="JOB|PID",
         help="have all ranks of a running job write their flight recorders, explain what the ranks do, and exit; the job "
              "continues. PID is the process id of horovodrun or of a rank on this host, JOB the number of a batch job on this "
              "host")  # fmt: skip
    flag(parser, "--top", metavar="JOB|PID",
         help="show what a running job does, and where its ranks wait, until Ctrl-C. Run this on the host of rank 0; JOB and "
              "PID are as for --dump")  # fmt: skip
    flag(parser, "--stdin", type=_rank_or_none, metavar="RANK",
         help="rank that reads standard input, for example for pdb; or none (default: 0 with -np 1, else none)")  # fmt: skip
    flag(parser, "--start-timeout", type=_positive, metavar="S",
         help=f"seconds until all ranks must have started (default: {config.START_TIMEOUT}, else 30)")  # fmt: skip
    flag(parser, "--config-file", metavar="YAML", help="read settings from this YAML file; flags override them")
    flag(parser, "--disable-cache", action="store_true", help="accepted, no effect: nothing is cached")

    _add_hosts(parser)
    _add_output(parser)
    _add_tunables(parser)
    _add_elastic(parser)
    _add_launchers(parser)
    return parser


def _add_hosts(parser: Parser) -> None:
    flag = parser.flag
    group = parser.add_argument_group(
        "hosts", f"other hosts are reached by ssh, or by the command in {config.SSH_COMMAND}"
    )
    where = group.add_mutually_exclusive_group()
    flag(where, "-H", "--hosts", metavar="HOSTS", help="hosts and their slots: h1:2,h2:4 (default: localhost:N)")
    flag(where, "-hostfile", "--hostfile", metavar="FILE", help="file with one `name slots=n` per line")
    flag(where, "--host-discovery-script", metavar="SCRIPT",
         help="command that prints the available hosts, one host:slots per line; makes the job elastic")  # fmt: skip
    flag(group, "--network-interfaces", type=_names, action="append", dest="nics", metavar="NICS",
         help="network interfaces the job may use, separated by commas")  # fmt: skip
    flag(group, "--network-interface", type=_names, action="append", dest="nics", metavar="NIC",
         help="the same; can be given several times")  # fmt: skip
    flag(group, "-p", "--ssh-port", type=_port, metavar="PORT", help="ssh port of the hosts")
    flag(group, "-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")


def _add_output(parser: Parser) -> None:
    flag = parser.flag
    group = parser.add_argument_group("output")
    flag(
        group,
        "--output-filename",
        metavar="DIR",
        help="also write each rank's output to DIR/rank.<r>/stdout and DIR/rank.<r>/stderr",
    )
    stamps = group.add_mutually_exclusive_group()
    flag(stamps, "-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
         dest="prefix_output_with_timestamp", help="put the time before each line of the ranks' output")  # fmt: skip
    flag(stamps, "--log-hide-timestamp", action="store_const", const=True, dest="old_hide_timestamp",
         help=argparse.SUPPRESS)  # fmt: skip
    flag(stamps, "--no-log-hide-timestamp", action="store_const", const=False, dest="old_hide_timestamp",
         help=argparse.SUPPRESS)  # fmt: skip
    _add_tunable(parser, stamps, next(tunable for tunable in TUNABLES if tunable.name == "log_with_timestamp"))


def _add_tunables(parser: Parser) -> None:
    for title, tunables in help_text.grouped().items():
        group = parser.add_argument_group(title)
        for tunable in tunables:
            if tunable.name != "log_with_timestamp":
                _add_tunable(parser, group.add_mutually_exclusive_group() if tunable.off else group, tunable)


def _add_tunable(parser: Parser, group: argparse._ActionsContainer, tunable: Tunable) -> None:
    described = help_text.described(tunable)
    if tunable.kind is bool:
        on, off = tunable.flag, tunable.off
        shown = argparse.SUPPRESS if tunable.on_hidden else described
        hidden = argparse.SUPPRESS if tunable.off_hidden else tunable.off_help or f"the opposite of {on}"
        parser.flag(group, on, action="store_const", const=True, dest=tunable.name, help=shown)
        parser.flag(group, off, action="store_const", const=False, dest=tunable.name, help=hidden)
    elif tunable.choices:
        parser.flag(group, tunable.flag, type=str.upper, choices=tunable.choices, dest=tunable.name, help=described)
    else:
        parser.flag(group, tunable.flag, type=tunable.kind, dest=tunable.name, metavar="X", help=described)


def _add_elastic(parser: Parser) -> None:
    flag = parser.flag
    group = parser.add_argument_group("elastic jobs")
    flag(group, "--min-np", "--min-num-proc", type=_positive, dest="min_num_proc", metavar="N",
         help="minimum number of ranks with which the job continues; makes the job elastic")  # fmt: skip
    flag(group, "--max-np", "--max-num-proc", type=_positive, dest="max_num_proc", metavar="N",
         help="maximum number of ranks (default: all slots)")  # fmt: skip
    flag(group, "--slots-per-host", type=_positive, dest="slots", metavar="N",
         help="slots of each host for which the discovery script prints no number")  # fmt: skip
    flag(group, "--elastic-timeout", type=_positive, metavar="S",
         help=f"seconds to wait for enough slots or ranks (default: {config.ELASTIC_TIMEOUT}, else 600)")  # fmt: skip
    flag(group, "--reset-limit", type=_not_negative, metavar="N",
         help="how many times the ranks may change before the job ends (default: no limit)")  # fmt: skip
    flag(group, "--blacklist-cooldown-range", type=_positive, nargs=2, dest="cooldown_range", metavar=("MIN", "MAX"),
         help="minimum and maximum number of seconds until a host on which a rank has failed is used again (default: the host "
              "is not used again)")  # fmt: skip


def _add_launchers(parser: Parser) -> None:
    flag = parser.flag
    group = parser.add_argument_group("how ranks are started")
    which = group.add_mutually_exclusive_group()
    flag(which, "--gloo", action="store_true", dest="use_gloo", help="by horovodrun itself (the default)")
    flag(which, "--mpi", action="store_true", dest="use_mpi", help="by mpirun")
    flag(which, "--jsrun", action="store_true", dest="use_jsrun", help="by jsrun")
    flag(group, "--mpi-args", metavar="ARGS", help='more arguments for mpirun, as in --mpi-args="-x NAME"')
    flag(group, "--tcp", action="store_true", dest="tcp_flag",
         help="have NCCL use TCP instead of InfiniBand between hosts (NCCL_IB_DISABLE=1)")  # fmt: skip
    flag(group, "--binding-args", metavar="ARGS",
         help="arguments that make mpirun or jsrun bind ranks to cores")  # fmt: skip


def _translate_old_flags(given: dict[str, Any]) -> None:
    """Accept flags that have a newer name, with a warning."""
    if "old_hide_timestamp" in given:
        print("horovodrun: --log-hide-timestamp is deprecated; use --log-without-timestamp", file=sys.stderr)
        given["log_with_timestamp"] = not given.pop("old_hide_timestamp")
