"""Which rendezvous the ranks of a job use."""

from __future__ import annotations

import pytest

from horovod._base.process_identity import ProcessIdentity
from horovod.control.rendezvous import over_mpi as rendezvous_over_mpi
from horovod.control.rendezvous.over_mpi import RendezvousOverMpi
from horovod.control.rendezvous.over_pmi import RendezvousOverPmi
from horovod.core.lifecycle.rendezvous import rendezvous_of
from horovod.core.lifecycle.world import choose

UNDER_HYDRA = ProcessIdentity(0, 4, 0, 2, 0, 2, "hostA", "MPICH", "mpich/1/2", local_ranks_known=False, over_mpi=True)
UNDER_OPEN_MPI = ProcessIdentity(
    0, 4, 0, 2, 0, 2, "hostA", "Open MPI", "open-mpi/x", local_ranks_known=False, over_mpi=True
)


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
