"""The YAML file of ``--config-file``: the same settings as the flags, in sections.

Only plain data is read from it. An unknown setting is an error, so that a misspelt one is noticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horovod.runner.errors import UsageError
from horovod.runner.tunables import TUNABLES, Value


def read_config_file(filename: str) -> tuple[str | None, dict[str, Value]]:
    """The controller that the file asks for, and its settings by :attr:`Tunable.name`.

    Raises:
        ValueError: the file cannot be read, is not YAML, or holds something unknown; the message names the file and the key.
    """
    content = _load(filename)
    settings: dict[str, Value] = {}
    by_key = {tunable.yaml_key: tunable for tunable in TUNABLES}
    sections = sorted({section for section, _ in by_key})
    controller: str | None = None
    for section, entries in content.items():
        if section == "controller":
            controller = _controller(filename, entries)
            continue
        if section not in sections:
            raise UsageError(f"{filename}: unknown section {section!r}; known are controller, {', '.join(sections)}")
        if entries is None:
            continue
        if not isinstance(entries, dict):
            raise UsageError(f"{filename}: section {section!r} must hold settings, one `name: value` a line")
        for key, value in entries.items():
            tunable = by_key.get((section, key))
            if tunable is None:
                known = ", ".join(name for owner, name in by_key if owner == section)
                raise UsageError(f"{filename}: unknown setting {key!r} in section {section!r}; known are {known}")
            if value is None:
                continue
            if isinstance(value, list) and tunable.pattern:
                value = ",".join(map(str, value))
            checked = tunable.check(value, f"{filename}: {section}.{key}")
            settings[tunable.name] = not checked if tunable.inverted else checked
    return controller, settings


def _load(filename: str) -> dict[Any, Any]:
    import yaml  # costs more than the rest of the launcher; most jobs have no such file

    try:
        content = yaml.safe_load(Path(filename).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the configuration file {filename}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"the configuration file {filename} is not valid YAML: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"the configuration file {filename} must hold sections such as `params:`, not {content!r:.40}")
    return content


def _controller(filename: str, value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in {"gloo", "mpi"}:
        raise UsageError(f"{filename}: No such controller supported: {value}; use gloo or mpi")
    return value.lower()
