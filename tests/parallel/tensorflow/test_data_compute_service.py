"""A compute job beside a training job: on pools of real ranks, and as users start both, to the end of their last process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horovod.control.secret import make_secret
from horovod.runner.common.service.compute_service import ComputeService
from horovod.tensorflow.data.compute_service import TfDataServiceConfig
from keras_ranks import POOL, QUIET
from launcher.harness import Launcher
from ranks import RankError, RankPool
from time_limits import SOON

Ranks = Callable[..., RankPool]
Serve = Callable[..., TfDataServiceConfig]
SECONDS = SOON


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(dispatchers, side, timeout)``: a service in this process for the workers of a pool; its configuration."""
    services: list[ComputeService] = []

    def start(dispatchers: int, side: str, timeout: int = 60) -> TfDataServiceConfig:
        key, each = make_secret(), max(1, POOL // dispatchers)
        services.append(ComputeService(dispatchers, each, key, nics={"lo"}))
        return TfDataServiceConfig(dispatchers, each, side, services[-1].addresses(), key, timeout)

    yield start
    for service in services:
        service.shutdown()


def two_pools(ranks: Ranks) -> tuple[RankPool, RankPool]:
    """Ranks for a compute job, and others for a training job."""
    return ranks(POOL, QUIET, "tensorflow"), ranks(POOL, {**QUIET, "TEST_POOL": "training"}, "tensorflow")


def work(config: TfDataServiceConfig) -> None:
    """Runs on the workers."""
    from horovod.tensorflow.data.compute_service import compute_worker_fn

    compute_worker_fn(config)


def read_several(config: TfDataServiceConfig, last: bool) -> list[list[int]]:
    """Runs on the training ranks: what each got of two data sets in two epochs each, of one dealt in turn, and of one alone."""
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow.data import compute_service

    assert tf.data.Dataset.send_to_data_service is compute_service.send_to_data_service
    hvd.init()
    try:
        rank, size, seen = hvd.rank(), hvd.size(), []
        for start in (0, 100):
            data = tf.data.Dataset.range(start, start + 20).map(lambda number: number * 2)
            mine = data.send_to_data_service(config, rank, size, reuse_dataset=True)
            for _ in range(2):
                seen.append([int(each) for each in mine])
                hvd.allgather_object(0)  # so that nobody begins the next epoch while others read this one
        endless = tf.data.Dataset.range(1000).repeat()
        mine = endless.send_to_data_service(config, rank, size, reuse_dataset=True, round_robin=True)
        dealt = iter(mine)  # kept until all have read: who leaves holds up the others
        seen.append([int(next(dealt)) for _ in range(9)])
        hvd.allgather_object(0)
        alone = tf.data.Dataset.range(6).send_to_data_service(config, rank)
        seen.append(sorted(int(each) for each in alone))
        hvd.allgather_object(0)
        if last and rank == 0:
            config.compute_client().shutdown()
        return seen
    finally:
        hvd.shutdown()


def test_ranks_share_what_workers_prepare(ranks: Ranks, serve: Serve) -> None:
    """A second training job is not taken for a part of the first, nor the second data set for the first."""
    config = serve(1, "compute")
    workers, training = two_pools(ranks)
    working = workers.start(work, config)
    for last in (False, True):
        seen = training.run(read_several, config, last, timeout=SECONDS)
        for number, start in enumerate((0, 0, 100, 100)):
            every = sorted(each for rank in seen for each in rank[number])
            assert every == [2 * each for each in range(start, start + 20)], "each element on one rank"
        assert all(len(rank[4]) == 9 for rank in seen)
        assert all(rank[5] == list(range(6)) for rank in seen), "all elements, where they are not shared"
    assert working.results(SECONDS) == [None] * POOL


def read_in_turn(config: TfDataServiceConfig) -> list[int]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    try:
        endless = tf.data.Dataset.range(1000).repeat()
        dealt = iter(endless.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True, round_robin=True))
        seen = [int(next(dealt)) for _ in range(9)]
        hvd.allgather_object(0)
        if hvd.rank() == 0:
            config.compute_client().shutdown()
        return seen
    finally:
        hvd.shutdown()


def test_ranks_read_in_turn_each_from_its_dispatcher(ranks: Ranks, serve: Serve) -> None:
    """No dispatcher waits for ranks that read from another. The data sets' method came with the configuration."""
    config = serve(POOL, "compute")
    workers, training = two_pools(ranks)
    working = workers.start(work, config)
    seen = training.run(read_in_turn, config, timeout=SECONDS)
    assert working.results(SECONDS) == [None] * POOL
    assert seen == [list(range(9))] * POOL, "each dispatcher has one worker, and one reader"


def read_from_own_dispatchers(config: TfDataServiceConfig) -> tuple[str, list[int]]:
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow.data.compute_service import tf_data_service

    hvd.init()
    try:
        with tf_data_service(config, hvd.rank()) as address:
            data = tf.data.Dataset.range(12).apply(
                tf.data.experimental.service.distribute("distributed_epoch", address, job_name="shared")
            )
            seen = [int(each) for each in data]
            hvd.allgather_object(0)
            if hvd.rank() == 0:
                config.compute_client().shutdown()
            return address, seen
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("dispatchers", [1, POOL])
def test_dispatchers_run_on_the_training_side(ranks: Ranks, serve: Serve, dispatchers: int) -> None:
    """One for all ranks, which share its elements; or one for each, which has them all."""
    config = serve(dispatchers, "training")
    workers, training = two_pools(ranks)
    working = workers.start(work, config)
    told = training.run(read_from_own_dispatchers, config, timeout=SECONDS)
    assert working.results(SECONDS) == [None] * POOL
    addresses = [address for address, _ in told]
    assert len(set(addresses)) == dispatchers and all(each.startswith("grpc://127.0.0.1:") for each in addresses)
    if dispatchers == 1:
        assert sorted(each for _, seen in told for each in seen) == list(range(12))
    else:
        assert all(sorted(seen) == list(range(12)) for _, seen in told)


def test_workers_without_a_dispatcher_give_up_when_their_timeout_is_over(ranks: Ranks, serve: Serve) -> None:
    config = serve(1, "training", timeout=1)
    with pytest.raises(RankError) as caught:
        ranks(POOL, QUIET, "tensorflow").run(work, config, timeout=SECONDS)
    for rank in range(POOL):
        assert "dispatcher 0 did not register within 1 seconds" in str(caught.value.errors[rank])


def test_a_compute_job_of_another_size_than_configured_is_refused(ranks: Ranks, serve: Serve) -> None:
    config = serve(2, "compute")  # with one worker each
    with pytest.raises(RankError) as caught:
        ranks(POOL, QUIET, "tensorflow").run(work, config, timeout=SECONDS)
    for rank in range(POOL):
        assert f"{POOL} ranks, but 2 dispatchers with 1 workers each need 2" in str(caught.value.errors[rank])


def test_a_number_of_ranks_that_dispatchers_do_not_divide_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    def check(configfile: str) -> str:
        from horovod.tensorflow.data import compute_worker

        with pytest.raises(ValueError) as caught:
            compute_worker.main([configfile, "--dispatchers", "2"])
        return str(caught.value)

    told = ranks(POOL, QUIET, "tensorflow").run(check, str(tmp_path / "config.json"), timeout=SECONDS)
    assert told == ["3 ranks cannot be divided evenly among 2 dispatchers; choose another number of either"] * POOL
    assert not list(tmp_path.iterdir())


TRAIN = """
import sys

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
config = TfDataServiceConfig.read("config.json", wait_for_file_creation=True, timeout=100)
data = tf.data.Dataset.range(40).map(lambda number: number * number)


def read(mine):
    every = hvd.allgather_object([int(each) for each in mine])
    if hvd.rank() == 0:
        print(sorted(sum(every, [])) == [number * number for number in range(40)], flush=True)


if config.dispatcher_side == "compute":
    read(data.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True))
else:
    with tf_data_service(config, hvd.rank()) as address:
        read(data.apply(tf.data.experimental.service.distribute("distributed_epoch", address, job_name="data")))
if hvd.rank() == 0 and sys.argv[1:] == ["last"]:
    config.compute_client(verbose=2).shutdown()
"""


def prepare(configfile: str, side: str) -> None:
    """Runs on the workers: the program of a compute job."""
    import signal

    from horovod.tensorflow.data import compute_worker

    before, os.environ["HOROVOD_GLOO_IFACE"] = signal.getsignal(signal.SIGTERM), "lo"
    try:
        compute_worker.main([configfile, "--dispatcher-side", side])
    finally:
        signal.signal(signal.SIGTERM, before)
        del os.environ["HOROVOD_GLOO_IFACE"]


def train(folder: str, *arguments: str) -> None:
    """Runs on the training ranks: the script of a training job."""
    import runpy
    import sys

    import horovod.tensorflow as hvd

    before = Path.cwd(), sys.argv
    os.chdir(folder)
    sys.argv = ["train.py", *arguments]
    try:
        runpy.run_path("train.py", run_name="__main__")
    finally:
        hvd.shutdown()
        os.chdir(before[0])
        sys.argv = before[1]


@pytest.mark.parametrize("side", ["compute", "training"])
def test_a_training_job_ends_the_compute_job_whose_file_it_has_read(ranks: Ranks, tmp_path: Path, side: str) -> None:
    """Both begin at the same moment; the file goes with the compute job."""
    (tmp_path / "train.py").write_text(TRAIN)
    workers, training = two_pools(ranks)
    working = workers.start(prepare, str(tmp_path / "config.json"), side)
    training.run(train, str(tmp_path), "last", timeout=SECONDS)
    assert "True" in training.output(0).splitlines(), training.output(0)
    assert working.results(SECONDS) == [None] * POOL
    assert "compute service with 3 workers" in workers.output(0)
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


class Jobs(Launcher):
    """Compute and training jobs, started as users do."""

    def job(self, size: int, *arguments: str) -> subprocess.Popen[str]:
        return self.start("-np", str(size), "python", *arguments, **QUIET, HOROVOD_GLOO_IFACE="lo")

    def compute(self, size: int) -> subprocess.Popen[str]:
        return self.job(size, "-m", "horovod.tensorflow.data.compute_worker", "config.json")


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    started = Jobs(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    try:
        yield started
        started.await_nothing(10)
    finally:
        for number in started.living():
            os.kill(number, signal.SIGKILL)
        for process in started.started:
            process.communicate(timeout=SECONDS)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def test_a_training_job_reads_from_a_compute_job_and_ends_it_with_its_file(jobs: Jobs) -> None:
    """Both begin at the same moment; the training job ends the other, whose file goes with it."""
    compute, train = jobs.compute(2), jobs.job(1, "train.py", "last")
    code, out, err = ended(train)
    assert (code, out) == (0, "[0]<stdout>:True\n"), err
    code, out, err = ended(compute)
    told = "[0]<stdout>:compute service with 2 workers; training jobs read config.json\n"
    assert (code, out) == (0, told), err
    assert [each.name for each in jobs.folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_compute_job_leaves_no_file(jobs: Jobs, ranks: Ranks, ending: signal.Signals) -> None:
    """After it has served one training job, whose end does not concern it."""
    compute = jobs.compute(1)
    jobs.await_line(compute, "training jobs read config.json")
    if ending == signal.SIGINT:
        _, training = two_pools(ranks)
        training.run(train, str(jobs.folder), timeout=SECONDS)
        assert "True" in training.output(0).splitlines(), training.output(0)
    assert (jobs.folder / "config.json").exists()
    compute.send_signal(ending)
    code, _, err = ended(compute)
    assert code == 128 + ending and "Traceback" not in err, err
    deadline = time.monotonic() + SECONDS
    while (jobs.folder / "config.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
