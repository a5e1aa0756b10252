"""Autotuning while real ranks train: all change their settings after the same step, and the results are the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod._base import config
from horovod.autotune import best_settings
from horovod.autotune.kept import read
from horovod.comm.tuned import TunedSettings
from horovod.core.lifecycle.context import running
from horovod.core.worker.coordinator import Coordinator
from regression import MAKERS, assert_same_on_all_ranks, batches, network, train

pytest.importorskip("optuna")

STEPS = 500
"""More than a search of TRIALS needs, whatever is measured."""
TRIALS = 8


def settings(folder: Path, **more: str) -> dict[str, str]:
    return {
        config.AUTOTUNE: "1",
        config.AUTOTUNE_WARMUP_SAMPLES: "0",
        config.AUTOTUNE_STEPS_PER_SAMPLE: "1",
        config.AUTOTUNE_MAX_SAMPLES: str(TRIALS),
        config.AUTOTUNE_FILE: str(folder / "choice.json"),
        config.AUTOTUNE_LOG: str(folder / "log.csv"),
        **more,
    }


def bits(model: torch.nn.Module) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def trained(steps: int = STEPS) -> bytes:
    model = network()
    optimizer = hvd.DistributedOptimizer(MAKERS["momentum"](model.parameters()))
    train(model, optimizer, batches(steps, hvd.size(), hvd.rank()))
    assert_same_on_all_ranks(model)
    return bits(model)


def tuning_is_over() -> bool:
    role = running().workers[0].role
    return not isinstance(role, Coordinator) or role.tuner is None


def test_training_is_the_same_while_settings_change(job: Any, tmp_path: Path) -> None:
    """Engines, reads, batches and buckets, also with several optimizers, a process set, and large tensors beside them."""

    def tune(sets: list[Any]) -> tuple[bytes, list[TunedSettings]]:
        best_settings.known = None
        seen: list[TunedSettings] = []
        model, other = network(), network()
        first = hvd.DistributedOptimizer(MAKERS["momentum"](model.parameters()))
        second = hvd.DistributedOptimizer(MAKERS["sgd"](other.parameters()), process_set=sets[0])
        large = torch.empty(300_000)
        for number, batch in enumerate(batches(STEPS, hvd.size(), hvd.rank())):
            large.fill_(hvd.rank() + number)
            handle = hvd.allreduce_async_(large, name="large", op=hvd.Sum)
            train(model, first, iter([batch]))
            if hvd.rank() < 2:
                train(other, second, iter([batch]))
            hvd.synchronize(handle)
            assert (large == number * hvd.size() + sum(range(hvd.size()))).all()
            tuned = running().workers[0].executor.tuned
            if tuned is not None and (not seen or seen[-1] != tuned):
                seen.append(tuned)
        hvd.barrier()
        assert tuning_is_over()
        assert_same_on_all_ranks(model)
        assert running().workers[0].executor.tuned == (best_settings.known and best_settings.known.settings)
        return bits(model), seen

    results = job(3, tune, env=settings(tmp_path), sets=[[0, 1]])
    plain = job(3, trained)
    assert [found for found, _ in results] == plain, "settings change no result"
    assert all(seen[-1] == results[0][1][-1] for _, seen in results)
    tried = results[0][1]
    assert len({each.bucket_bytes for each in tried}) > 1
    assert len({each.fusion_threshold for each in tried}) > 1
    kept = read(tmp_path / "choice.json")
    assert kept is not None and kept.finished and kept.settings == tried[-1]
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert 2 <= len(lines) <= 1 + 2 * TRIALS + 2 * 5 * 4 + 1, (
        "heading, trials, last turns, a reference each; the choice"
    )


def test_the_next_run_begins_with_what_was_kept(job: Any, tmp_path: Path) -> None:
    def run(forget: bool) -> tuple[bool, TunedSettings | None]:
        if forget:
            best_settings.known = None
        trained(STEPS if forget else 20)
        return tuning_is_over(), running().workers[0].executor.tuned

    env = settings(tmp_path)
    first = job(2, run, True, env=env)
    again = job(2, run, False, env=env)
    assert again == first and first[0][0] and first[0][1] is not None


def test_ranks_that_join_early_end_no_search(job: Any, tmp_path: Path) -> None:
    """One rank has fewer batches in each epoch; collectives without an optimizer are tuned as well."""

    def run() -> list[float]:
        best_settings.known = None
        found = []
        tensor = torch.empty(40_000)
        for _ in range(6):
            for _ in range(30 if hvd.rank() else 20):
                for name in ("a", "b"):
                    tensor.fill_(1.0)
                    hvd.allreduce_(tensor, name=name, op=hvd.Sum)
            found.append(float(tensor[0]))
            hvd.join()
        return found

    results = job(2, run, env=settings(tmp_path))
    assert results == [[2.0] * 6, [1.0] * 6]
    assert read(tmp_path / "choice.json") is not None


def test_one_rank_has_nothing_to_tune(job: Any, tmp_path: Path) -> None:
    assert job(1, tuning_is_over, env=settings(tmp_path)) == [True]


def test_without_optuna_init_says_what_to_install(job: Any, tmp_path: Path) -> None:
    def run() -> str:
        from horovod.autotune import search

        hvd.shutdown()
        find = search.importlib.util.find_spec
        search.importlib.util.find_spec = lambda name: None if name == "optuna" else find(name)
        try:
            hvd.init()
        except ImportError as error:
            return str(error)
        finally:
            search.importlib.util.find_spec = find
        return ""

    for text in job(2, run, env=settings(tmp_path)):
        assert f"{config.AUTOTUNE} is set, but this rank cannot tune" in text
        assert "pip install 'horovod[autotune]'" in text


def test_a_file_of_another_program_stays(job: Any, tmp_path: Path) -> None:
    def run() -> bool:
        best_settings.known = None
        trained()
        return tuning_is_over()

    (tmp_path / "choice.json").write_text("precious")
    assert all(job(2, run, env=settings(tmp_path)))
    assert (tmp_path / "choice.json").read_text() == "precious"
