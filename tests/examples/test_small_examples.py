"""The examples of single capabilities on real ranks: they learn, their ranks agree, and only rank 0 speaks."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranks import RankPool

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

Example = Callable[..., list[Any]]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("pytorch_*.py"))


def numbers(label: str, text: str) -> list[float]:
    """Every number that follows ``label``."""
    return [float(found) for found in re.findall(rf"{label} (-?[\d.]+)", text)]


def spoken(ended: list[Any]) -> str:
    """What rank 0 said, and that nobody else said anything."""
    assert [each.printed for each in ended[1:]] == [""] * (len(ended) - 1)
    return ended[0].printed


@pytest.mark.parametrize(
    "command",
    [
        "pytorch_adasum.py",
        "pytorch_adasum.py --average",
        "pytorch_powersgd.py",
        "pytorch_powersgd.py --compression topk",
        "pytorch_uneven_data.py",
    ],
)
def test_two_ranks_learn_one_model(example: Example, command: str) -> None:
    ended = example(command)
    said = spoken(ended)
    assert [line.split(": ")[0] for line in said.splitlines()] == [f"epoch {epoch}" for epoch in range(1, 6)]
    accuracies = numbers("test accuracy", said)
    assert len(accuracies) == 5 and accuracies[-1] > 82, said
    losses = numbers("training loss", said)
    assert not losses or losses[-1] < 0.5 * losses[0], said
    assert ended[0].parameters == ended[1].parameters != []
    if command.startswith("pytorch_uneven_data.py"):
        assert said.count("steps by rank [15, 30], rank 1 was last") == 5


@pytest.mark.parametrize("rollback", ["commit", "step"])
def test_two_ranks_learn_with_an_elastic_state(example: Example, rollback: str) -> None:
    """With a fixed number of ranks, as readers start the elastic example first."""
    ended = example(f"pytorch_mnist_elastic.py --epochs 3 --rollback {rollback}")
    accuracies = [float(found) for found in re.findall(r"reads ([\d.]+)%", spoken(ended))]
    assert len(accuracies) == 3 and accuracies[-1] > 80, ended[0].printed
    assert ended[0].parameters == ended[1].parameters != []


def test_two_halves_learn_two_models_and_vote(example: Example) -> None:
    ended = example("pytorch_process_sets.py", size=4)
    said = spoken(ended)
    first, second = (ended[rank].parameters for rank in (0, 2))
    assert ended[1].parameters == first and ended[3].parameters == second, "a half has one model"
    assert first != second, "two halves have two"
    *_, last = said.splitlines()
    one, other, together = [float(found) for found in re.findall(r"([\d.]+)%", last)]
    assert min(one, other) > 80 and together > 80, said


def test_one_rank_has_one_model(example: Example) -> None:
    said = spoken(example("pytorch_process_sets.py --epochs 1", size=1))
    assert re.fullmatch(r"epoch 1: test accuracy alone ([\d.]+%), together \1\n", said)


def test_a_generator_comes_closer_to_digits(example: Example) -> None:
    ended = example("pytorch_gan.py --epochs 20")
    distances = numbers("distance from real digits", spoken(ended))
    assert len(distances) == 3 and distances[-1] < 0.8 * distances[0], distances
    assert ended[0].parameters == ended[1].parameters, "generator and discriminator are the same on both ranks"
    assert len(ended[0].parameters) == 2


SETTINGS = "--batch-size 2 --image-size 32 --num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 2"


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ("--model resnet50", 25_557_032),
        ("--model small --fp16-allreduce", 1_036_648),
        ("--model small --use-adasum", 1_036_648),
    ],
)
def test_the_benchmark_trains_and_measures(example: Example, options: str, parameters: int) -> None:
    ended = example(f"pytorch_synthetic_benchmark.py --no-cuda {options} {SETTINGS}")
    said = spoken(ended)
    assert f"{parameters:,} parameters" in said
    assert len(ended[0].parameters[0]) == 4 * parameters
    assert ended[0].parameters == ended[1].parameters, "the ranks saw different images and made the same step"
    rates = numbers(r"iteration \d:", said)
    each, all_ranks = numbers("Img/sec per rank:", said), numbers(r"Total img/sec on 2 rank\(s\):", said)
    assert len(rates) == 2 and min(rates) > 0
    assert each[0] == pytest.approx(sum(rates) / 2, abs=0.11) and all_ranks[0] == pytest.approx(2 * each[0], abs=0.2)


def test_a_job_that_was_stopped_continues_to_the_same_bits(example: Example, tmp_path: Path) -> None:
    script = "pytorch_exact_resume.py --epochs 2"
    whole = spoken(example(script))
    checkpoint = f"--checkpoint {tmp_path / 'run.pt'}"
    first = spoken(example(f"{script} {checkpoint} --stop-after 30"))
    assert first.startswith("step 30: ")
    (tmp_path / "copy.pt").write_bytes((tmp_path / "run.pt").read_bytes())
    again = example(f"{script} {checkpoint}")
    assert whole == spoken(again) and whole.startswith("step 46: ")
    assert again[0].parameters == again[1].parameters
    other = spoken(example(f"{script} --checkpoint {tmp_path / 'copy.pt'}", size=3))
    assert other.startswith("step 46: ") and numbers("reads", other)[0] > 70, other


def test_a_signal_on_one_rank_stops_all_ranks_after_one_step(
    ranks: Callable[..., RankPool], example: Example, tmp_path: Path
) -> None:
    ranks(2, None, "torch").run(_interrupt_rank_1_in_its_fifth_step)
    said = spoken(example(f"pytorch_exact_resume.py --epochs 100000 --checkpoint {tmp_path / 'run.pt'}"))
    assert numbers("step", said) == [5]
    assert torch.load(tmp_path / "run.pt", weights_only=True)["step"] == 5


def _interrupt_rank_1_in_its_fifth_step() -> None:
    """Runs on a rank: its next optimizer's fifth step sends SIGTERM on rank 1, which the ranks were numbered by before."""
    import os
    import signal
    from itertools import count

    from torch.optim.optimizer import register_optimizer_step_post_hook

    from horovod._base import config

    steps = count(1)

    def interrupt(*_: Any) -> None:
        if next(steps) == 5:
            hook.remove()
            if os.environ[config.RANK] == "1":
                os.kill(os.getpid(), signal.SIGTERM)

    hook = register_optimizer_step_post_hook(interrupt)


def test_every_example_has_help_that_says_how_it_is_run(example: Example) -> None:
    for script in SCRIPTS:
        (ended,) = example(f"{script} --help", size=1)
        assert ended.printed.startswith(f"usage: {script} [-h]"), ended.printed
        assert f"horovodrun -np 2 python examples/{script}" in (EXAMPLES / script).read_text()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_imports_no_other_and_names_what_it_needs(path: Path) -> None:
    text = path.read_text()
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {each.stem for each in EXAMPLES.iterdir()}, "it runs alone"
    (needs,) = re.findall(r"^Needs the extras? (.+?)\. .*(?:less than|about)\s+a minute", text, re.MULTILINE)
    extras = re.findall(r"``(\w+)``", needs)
    row = rf"^\| \[`{path.name}`\]\({path.name}\) \| .+ \| (.+) \|$"
    listed = re.findall(row, (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in listed] == [extras]
    project = (EXAMPLES.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
