"""The texts of ``horovodrun --help`` and ``--help-all``: which flags are shown, in which groups, with which defaults. Pure."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

from horovod._base import config
from horovod._base.config import Config
from horovod.runner.tunables import TUNABLES, Tunable

USAGE = "horovodrun -np N [-H host:slots,...] [options] command [arguments of the command]"
EXAMPLES = """\
examples:
  horovodrun -np 4 python train.py                       four ranks on this host
  horovodrun -np 8 -H hostA:4,hostB:4 python train.py    eight ranks on two hosts, reached by ssh
  horovodrun -np 4 --dry-run python train.py             print what would start, and start nothing
"""
MORE = "horovodrun --help-all lists every flag, with its default and its environment variable."

OFTEN = frozenset(
    {
        "-h", "--help-all", "-v", "-cb", "-np", "--verbose", "--dry-run", "--dump", "--top", "--config-file", "--start-timeout",
        "-H", "-hostfile", "--host-discovery-script", "--network-interfaces", "-p", "-i",
        "--output-filename", "-prefix-timestamp", "--timeline-filename", "--log-level", "--autotune",
        "--min-np", "--max-np", "--mpi",
    }
)  # fmt: skip
"""The flags that ``--help`` shows; ``--help-all`` shows all."""

GROUPS = {
    "params": "batches and engines",
    "timeline": "timeline",
    "metrics": "metrics",
    "stall_check": "stalled tensors",
    "library_options": "libraries and threads",
    "logging": "log messages",
    "autotune": "autotuning",
}
"""The headings of the runtime's settings, by their section of the YAML file."""


def grouped() -> dict[str, list[Tunable]]:
    """The runtime's settings by heading."""
    return {title: [each for each in TUNABLES if each.yaml_key[0] == section] for section, title in GROUPS.items()}


def described(tunable: Tunable) -> str:
    """The help of a setting: what it does, its default, its variable."""
    default = default_of(tunable)
    known = f"default: {default}; {tunable.variable}" if default else tunable.variable
    return f"{tunable.help} ({known})".replace("%", "%%")


def default_of(tunable: Tunable) -> str:
    """The default of a setting, in the flag's unit; "" if there is none to show."""
    defaults: dict[str, Any] = {each.metadata["variable"]: each.default for each in fields(Config) if each.metadata}
    value = defaults.get(tunable.variable)
    if value is None or tunable.kind is bool or value in ("", ()):
        return ""
    if isinstance(value, timedelta):
        return f"{value / timedelta(milliseconds=1 if tunable.name.endswith('_ms') else 1000):g}"
    if tunable.name.endswith("_mb"):
        return f"{value / config.MEBIBYTE:g}"
    return str(value).upper() if tunable.choices else str(value)
