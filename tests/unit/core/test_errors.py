"""The errors that users catch, and the import path under which they know them."""

from __future__ import annotations

import pytest

from horovod.common import exceptions
from horovod.core import errors


def test_a_failed_collective_is_a_runtime_error() -> None:
    assert issubclass(errors.HorovodInternalError, RuntimeError)


@pytest.mark.parametrize("skip_sync", [True, False])
def test_changed_hosts_say_whether_to_synchronise(skip_sync: bool) -> None:
    error = errors.HostsUpdatedInterrupt(skip_sync)
    assert isinstance(error, RuntimeError)
    assert error.skip_sync is skip_sync


def test_a_version_mismatch_names_both_versions() -> None:
    error = errors.HorovodVersionMismatchError("torch", "2.1", "1.9")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "2.1", "1.9")
    for part in ("torch", "2.1", "1.9"):
        assert part in str(error)
    assert str(error) == errors.get_version_mismatch_message("torch", "2.1", "1.9")


def test_the_public_names_are_these_objects() -> None:
    for name in exceptions.__all__:
        assert getattr(exceptions, name) is getattr(errors, name)
