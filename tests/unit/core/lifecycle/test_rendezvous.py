"""What ranks tell each other when they meet, and whether it fits together."""

from __future__ import annotations

import pytest

from horovod._base.config import Config
from horovod._base.process_identity import ProcessIdentity
from horovod.control.rendezvous import over_mpi as rendezvous_over_mpi
from horovod.control.rendezvous.over_mpi import RendezvousOverMpi
from horovod.control.rendezvous.over_pmi import RendezvousOverPmi
from horovod.core.lifecycle.rendezvous import check_settings, rendezvous_of
from horovod.core.lifecycle.world import choose

UNDER_HYDRA = ProcessIdentity(0, 4, 0, 2, 0, 2, "hostA", "MPICH", "mpich/1/2", local_ranks_known=False, over_mpi=True)
UNDER_OPEN_MPI = ProcessIdentity(
    0, 4, 0, 2, 0, 2, "hostA", "Open MPI", "open-mpi/x", local_ranks_known=False, over_mpi=True
)


def test_settings_that_agree() -> None:
    check_settings([Config().common()] * 3)
    check_settings([Config(cache_capacity=7, bucket_bytes=100).common()] * 2)


def test_settings_that_differ_are_an_error_with_all_ranks_and_values() -> None:
    settings = [Config(), Config(cache_capacity=0), Config(), Config(cache_capacity=7, dynamic_process_sets=True)]
    with pytest.raises(ValueError) as caught:
        check_settings([each.common() for each in settings])
    text = str(caught.value)
    assert text.startswith("Horovod initialization failed: settings that must be the same on all ranks differ: ")
    assert "HOROVOD_CACHE_CAPACITY is 1024 on ranks 0, 2, 0 on rank 1, 7 on rank 3" in text
    assert "HOROVOD_DYNAMIC_PROCESS_SETS is 0 on ranks 0-2, 1 on rank 3" in text
    assert "FUSION" not in text


def test_how_long_things_may_take_is_each_ranks_own_affair() -> None:
    assert Config().common() == Config.from_env({"HOROVOD_GLOO_TIMEOUT_SECONDS": "7"}).common()


def test_hydra_passes_on_what_ranks_on_several_hosts_tell_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_over_mpi, "obtainable", lambda: False)
    assert isinstance(rendezvous_of(choose(None, UNDER_HYDRA), {"PMI_FD": "9"}), RendezvousOverPmi)
    with pytest.raises(
        ValueError, match=r"MPICH started 4 ranks on several hosts .*pip install mpi4py.*horovodrun --mpi"
    ):
        rendezvous_of(choose(None, UNDER_HYDRA), {})


def test_open_mpi_needs_mpi4py_for_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_over_mpi, "obtainable", lambda: True)
    assert isinstance(rendezvous_of(choose(None, UNDER_OPEN_MPI), {}), RendezvousOverMpi)
    monkeypatch.setattr(rendezvous_over_mpi, "obtainable", lambda: False)
    with pytest.raises(ValueError, match=r"Open MPI started 4 ranks .*install mpi4py for the Python of every rank"):
        rendezvous_of(choose(None, UNDER_OPEN_MPI), {})


def test_mpi4py_is_no_help_under_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_over_mpi, "obtainable", lambda: True)
    with pytest.raises(ValueError, match="torchrun started 4 ranks on several hosts"):
        rendezvous_of(choose(None, ProcessIdentity(0, 4, 0, 2, 0, 2, "hostA", "torchrun", "x")), {"PMI_FD": "9"})


def test_a_list_of_ranks_is_refused_where_ranks_meet_through_mpis_launcher() -> None:
    with pytest.raises(
        ValueError, match=r"comm=\[0, 2\]: where MPICH starts ranks on several hosts, a list of ranks needs"
    ):
        rendezvous_of(choose([0, 2], UNDER_HYDRA), {"PMI_FD": "9"})
