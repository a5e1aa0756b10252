"""The lab, step by step on two ranks: what each step changes can be seen in what they print, train and leave behind."""

from __future__ import annotations

import ast
import csv
import difflib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import horovod
from keras_ranks import env_of
from launcher.harness import EAGER
from part import repeats
from ranks import RankPool

pytest.importorskip("tensorflow")
pytest.importorskip("keras")
datasets = pytest.importorskip("sklearn.datasets")

LAB = Path(__file__).resolve().parents[2] / "examples" / "fashion_mnist"
SOURCE = Path(horovod.__file__).resolve().parents[1]
STEPS = [f"fashion_mnist_after_step_{step:02}.py" for step in range(1, 11)]
QUIET = env_of("tensorflow")

TRAIN, TEST, BATCH = 256, 64, 32
SMALL = f"--depth 10 --width 1 --batch-size {BATCH} --val-batch-size {BATCH} --epochs 3 --base-lr 0.03"


class Ended(NamedTuple):
    """How a script ended on one rank.

    Attributes:
        printed: what it wrote to stdout.
        weights: the bytes of all trained weights.
        moved: how far training has moved each of them, one after another.
        epochs: those that it trained, from 0.
        history: by metric, its value in each of them.
        steps: the training steps of an epoch.
        optimizer: its class's name, the module of that, its learning rate and its steps.
    """

    printed: str
    weights: bytes
    moved: np.ndarray[Any, Any]
    epochs: list[int]
    history: dict[str, list[float]]
    steps: int
    optimizer: tuple[str, str, float, int]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """320 digits of 8 x 8 pixels in a file."""
    digits = datasets.load_digits()
    path = tmp_path_factory.mktemp("images") / "digits.npz"
    count = TRAIN + TEST
    np.savez(path, x=(digits.images[:count] * 15).astype(np.uint8), y=digits.target[:count].astype(np.uint8))
    return path


@pytest.fixture
def lab(ranks: Callable[..., RankPool], images: Path, tmp_path: Path) -> Callable[..., list[Ended]]:
    """``lab(5, "--epochs 2")``: run the script of a step on two ranks; by rank, how it ended. Step 0 runs alone."""

    def run(step: int, options: str = "", gpus: int = 0) -> list[Ended]:
        script = STEPS[step - 1] if step else "fashion_mnist.py"
        arguments = [*SMALL.split(), "--data", str(images), "--log-dir", str(tmp_path / "logs"), *options.split()]
        chosen = None if step else [0]
        pool = ranks(2, QUIET, "keras")
        return pool.run(_run_script, str(LAB / script), arguments, gpus, ranks=chosen)

    return run


def _run_script(script: str, arguments: list[str], gpus: int) -> Ended:
    """Runs on a rank: the script as ``__main__``, and what its variables hold in the end."""
    import contextlib
    import io
    import runpy
    from pathlib import Path
    from unittest import mock

    import keras
    import tensorflow as tf

    import horovod.keras as hvd

    def small(shape: tuple[int, int, int], classes: int, *_: object) -> Any:
        """Instead of the real network: TensorFlow traces it in a fraction of the time."""
        layers = [keras.layers.Conv2D(8, 3), keras.layers.BatchNormalization(), keras.layers.ReLU()]
        return keras.Sequential([keras.Input(shape), *layers, keras.layers.Flatten(), keras.layers.Dense(classes)])

    fit, begin, histories = keras.Model.fit, [], []

    def noted(model: Any, *args: Any, **keywords: Any) -> Any:
        begin.extend(weight.numpy() for weight in model.trainable_weights)
        histories.append(fit(model, *args, **keywords))  # before Keras 3.9, evaluate empties model.history
        return histories[-1]

    pinned = mock.Mock()
    patches = [
        mock.patch.object(sys, "argv", [script, *arguments]),
        mock.patch.object(sys, "path", [str(Path(script).parent), *sys.path]),
        mock.patch("lab.wide_resnet", small),
        mock.patch.object(keras.Model, "fit", noted),
    ]
    if gpus:
        real, fake = tf.config.list_physical_devices, [f"GPU:{number}" for number in range(gpus)]
        patches += [
            mock.patch.object(
                tf.config, "list_physical_devices", lambda kind=None: fake if kind == "GPU" else real(kind)
            ),
            mock.patch.object(tf.config.experimental, "set_memory_growth", pinned.grows),
            mock.patch.object(tf.config, "set_visible_devices", pinned.sees),
        ]
    keras.backend.clear_session()
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            variables = runpy.run_path(script, run_name="__main__")
    finally:
        hvd.shutdown()
    model, (history,) = variables["model"], histories
    optimizer = model.optimizer
    return Ended(
        "".join(f"{call}\n" for call in pinned.mock_calls) + printed.getvalue(),
        b"".join(np.ascontiguousarray(weight.numpy()).tobytes() for weight in model.trainable_weights),
        np.concatenate(
            [(end.numpy() - start).ravel() for end, start in zip(model.trainable_weights, begin, strict=True)]
        ),
        list(history.epoch),
        {name: [float(value) for value in values] for name, values in history.history.items()},
        history.params["steps"],
        (
            type(optimizer).__name__,
            type(optimizer).__module__,
            float(optimizer.learning_rate.numpy()),
            int(optimizer.iterations.numpy()),
        ),
    )


def rows(logs: Path) -> list[dict[str, float]]:
    """What a run wrote down, a row for each epoch."""
    with (logs / "epochs.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def learned(ended: Ended) -> bool:
    return ended.history["loss"][-1] < ended.history["loss"][0]


def test_the_first_script_trains_in_one_process(lab: Callable[..., list[Ended]], tmp_path: Path) -> None:
    (ended,) = lab(0)
    assert learned(ended) and ended.steps == TRAIN // BATCH
    lines = ended.printed.splitlines()
    assert sum("images/sec" in line and "s of training so far" in line for line in lines) == 3, ended.printed
    assert lines[-1].startswith("test loss ") and "test accuracy" in lines[-1]
    written = rows(tmp_path / "logs")
    assert [row["epoch"] for row in written] == [1, 2, 3]
    assert all(row["images_per_second"] > 0 for row in written)
    assert written[0]["seconds"] < written[1]["seconds"] < written[2]["seconds"]


def test_step_1_gives_every_rank_a_gpu(lab: Callable[..., list[Ended]]) -> None:
    for rank, ended in enumerate(lab(1, gpus=2)):
        calls = ["call.grows('GPU:0', True)", "call.grows('GPU:1', True)", f"call.sees('GPU:{rank}', 'GPU')"]
        assert ended.printed.splitlines()[:3] == calls
        assert learned(ended) and "test accuracy" in ended.printed, "each trains a network of its own"


def test_step_2_prints_on_rank_0_only(lab: Callable[..., list[Ended]], tmp_path: Path) -> None:
    first, second = lab(2)
    assert "Epoch 3/3" in first.printed and "images/sec" in first.printed and "test accuracy" in first.printed
    assert second.printed == "" and learned(second)
    assert len(rows(tmp_path / "logs")) == 3
    assert first.optimizer[:2] == ("SGD", "keras.src.optimizers.sgd")


def test_step_3_averages_gradients(lab: Callable[..., list[Ended]]) -> None:
    first, second = lab(3)
    assert first.optimizer[:2] == second.optimizer[:2] == ("SGD", "horovod._keras")
    assert first.weights != second.weights
    np.testing.assert_allclose(first.moved, second.moved, atol=1e-5, err_msg="the same steps, from different weights")
    assert np.abs(first.moved).max() > 0.01


def test_step_4_begins_with_the_same_weights(lab: Callable[..., list[Ended]]) -> None:
    first, second = lab(4)
    assert first.weights == second.weights
    assert learned(first) and first.steps == TRAIN // BATCH


def test_step_5_shares_an_epoch(lab: Callable[..., list[Ended]]) -> None:
    first, second = lab(5)
    assert first.steps == second.steps == TRAIN // BATCH // 2
    assert first.optimizer[3] == 3 * first.steps
    assert first.weights == second.weights and learned(first)
    assert first.history != second.history, "the metrics are still each rank's own"


def test_step_6_averages_metrics_and_stops_together(lab: Callable[..., list[Ended]]) -> None:
    first, second = lab(6, "--target-accuracy 0 --patience 1")
    assert first.history == second.history, "the same numbers, bit for bit"
    assert first.epochs == second.epochs == [0, 1], "two epochs in a row were good enough"
    assert first.weights == second.weights


def test_step_7_resumes_from_the_checkpoint(lab: Callable[..., list[Ended]], tmp_path: Path) -> None:
    before = lab(7, "--use-checkpointing --epochs 2")
    folder = tmp_path / "logs" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["epoch-001.keras", "epoch-002.keras"]
    first, second = lab(7, "--use-checkpointing --epochs 3 --base-lr 7")
    assert first.epochs == second.epochs == [2]
    assert first.optimizer == second.optimizer == ("SGD", "horovod._keras", pytest.approx(0.03), 12), "state, too"
    assert first.weights == second.weights != before[0].weights
    assert [row["epoch"] for row in rows(tmp_path / "logs")] == [1, 2, 3]
    assert first.history["loss"][0] < before[0].history["loss"][0], "it had learned something before"


def test_step_8_scales_the_learning_rate(lab: Callable[..., list[Ended]]) -> None:
    first, second = lab(8)
    assert first.optimizer[2] == second.optimizer[2] == pytest.approx(2 * 0.03)
    assert first.weights == second.weights and learned(first)


def test_step_9_warms_up_and_drops(lab: Callable[..., list[Ended]], tmp_path: Path) -> None:
    """With four steps in an epoch; the file has the learning rate of an epoch's last step."""
    first, second = lab(9, "--epochs 36 --warmup-epochs 4 --batch-size 128 --val-batch-size 64 --base-lr 0.01")
    assert "Epoch 4: finished gradual learning rate warmup to 0.02." in first.printed and second.printed == ""
    rates = [row["learning_rate"] for row in rows(tmp_path / "logs")]
    wanted = [0.0125, 0.015, 0.0175, 0.02] + 11 * [0.02] + 10 * [0.002] + 10 * [0.0002] + [0.00002]
    assert rates == pytest.approx(wanted, rel=1e-5)
    assert first.optimizer[2] == second.optimizer[2] == pytest.approx(0.00002)
    assert first.weights == second.weights and learned(first)


def test_step_10_trains_with_novograd(lab: Callable[..., list[Ended]], tmp_path: Path) -> None:
    # Six epochs: after two, one network in ten is no better than at its random beginning.
    first, second = lab(10, "--epochs 6 --warmup-epochs 1 --use-checkpointing")
    assert first.optimizer == second.optimizer == ("NovoGrad", "horovod._keras", pytest.approx(2 * 0.03), 24)
    assert first.weights == second.weights and learned(first)
    first, second = lab(10, "--epochs 7 --warmup-epochs 1 --use-checkpointing")
    assert first.epochs == second.epochs == [6]
    assert first.optimizer == second.optimizer == ("NovoGrad", "horovod._keras", pytest.approx(2 * 0.03), 28)
    assert first.weights == second.weights


def code(script: str) -> str:
    """What a script does: its text without title and comments."""
    tree = ast.parse((LAB / script).read_text())
    return ast.unparse(ast.Module(tree.body[1:], []))


def test_the_solution_is_the_last_step_with_the_steps_numbers() -> None:
    solution = (LAB / "fashion_mnist_solution.py").read_text()
    assert code("fashion_mnist_solution.py") == code(STEPS[-1])
    assert {int(number) for number in re.findall(r"# (\d+): ", solution)} == set(range(1, 11))


def test_a_step_changes_little() -> None:
    """So that what it teaches can be seen in a difference of few lines."""
    for before, after in pairwise(["fashion_mnist.py", *STEPS]):
        lines = list(difflib.ndiff(code(before).splitlines(), code(after).splitlines()))
        changed = sum(line.startswith(("+ ", "- ")) for line in lines)
        assert 1 <= changed <= 12, f"{before} -> {after}:\n" + "\n".join(lines)


def test_all_ranks_take_the_same_images(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    """Fashion-MNIST where all have it, digits where one has not; and a file that is not there is one clear line."""

    def load(lab: str, home: str, has_it: list[bool]) -> tuple[int, bool, str]:
        import contextlib
        import io
        import os
        import sys
        from unittest import mock

        import keras
        import numpy as np

        import horovod.keras as hvd

        hvd.init()

        def load_data() -> object:
            if not has_it[hvd.rank()]:
                raise Exception("URL fetch failure")
            return [(np.zeros((n, 28, 28), np.uint8), np.arange(n, dtype=np.uint8) % 10) for n in (60, 10)]

        try:
            with (
                mock.patch.object(sys, "path", [lab, *sys.path]),
                mock.patch.dict(os.environ, KERAS_HOME=home),
                mock.patch.object(keras.datasets.fashion_mnist, "load_data", load_data),
                contextlib.redirect_stdout(io.StringIO()) as printed,
            ):
                from lab import data

                images = data.load(None, hvd)
                return images.train_count, images.may_flip, printed.getvalue()
        finally:
            hvd.shutdown()

    pool = ranks(2, QUIET, "keras")
    assert pool.run(load, str(LAB), str(tmp_path), [True, True]) == [(60, True, "")] * 2
    said = "Fashion-MNIST cannot be downloaded (by another rank): training on generated images of digits\n"
    assert pool.run(load, str(LAB), str(tmp_path), [True, False]) == [(8000, False, said), (8000, False, "")]


def test_generated_images_are_enough_to_share_and_the_same_on_all_ranks(ranks: Callable[..., RankPool]) -> None:
    def look(lab: str) -> tuple[str, int, int, bool]:
        import hashlib
        import sys
        from unittest import mock

        with mock.patch.object(sys, "path", [lab, *sys.path]):
            from lab import data
        images = data._generated()
        few = data.load(None, limit=50)
        digest = hashlib.sha256(images.train[0].tobytes() + images.test[0].tobytes()).hexdigest()
        seen = {image.tobytes() for image in images.train[0]}
        return digest, few.train_count, few.test_count, any(image.tobytes() in seen for image in images.test[0])

    found = ranks(2, QUIET, "keras").run(look, str(LAB))
    assert found[0] == found[1]
    assert found[0][1:] == (40, 10, False)


def test_pipelines_and_files(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    """A rank's images are its own, each once in an epoch; augmentation moves and mirrors; a missing file is one clear line."""

    def look(lab: str, nowhere: Path) -> tuple[list[int], set[tuple[int, ...]], str]:
        import sys
        from unittest import mock

        import numpy as np

        with mock.patch.object(sys, "path", [lab, *sys.path]):
            from lab import data
        pixels, labels = np.zeros((48, 16, 16, 1), np.uint8), np.arange(48, dtype=np.int32)
        pixels[:, 8, 7] = 255  # a bright point beside the axis, which a mirror moves by one
        images = data.Images((pixels, labels), (pixels, labels), may_flip=True)
        seen, positions = [], set()
        for batch, numbers in images.training(8, rank=1, ranks=2).take(3):
            seen += numbers.numpy().tolist()
            found = batch.numpy()
            assert found.shape == (8, 16, 16, 1) and found.dtype == np.float32 and found.min() == -1
            assert ((found == 1).sum(axis=(1, 2, 3)) == 1).all()
            positions |= {(int(y), int(x)) for _, y, x, _ in np.argwhere(found == 1)}
        try:
            data.load(nowhere)
        except SystemExit as end:
            return sorted(seen), positions, str(end.code)
        raise AssertionError("it should have ended")

    (found,) = ranks(2, QUIET, "keras").run(look, str(LAB), tmp_path / "nowhere.npz", ranks=[0])
    seen, positions, end = found
    assert seen == list(range(1, 48, 2))
    assert (
        len(positions) > 5
        and {y for y, _ in positions} <= set(range(6, 11))
        and {x for _, x in positions} <= set(range(5, 11))
    )
    assert end.startswith(f"--data {tmp_path}/nowhere.npz: ") and "'x' and 'y'" in end and "\n" not in end


def start(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run something to its end as a user would, with whatever it leaves behind in ``folder``."""
    own = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    own |= {
        "PYTHONPATH": os.pathsep.join([str(SOURCE), EAGER]),
        **QUIET,
        "JUPYTER_RUNTIME_DIR": str(folder),
        "JUPYTER_CONFIG_DIR": str(folder),
    }
    own |= {"IPYTHONDIR": str(folder), "MPLCONFIGDIR": str(folder), "HOROVOD_CHECK": "error", **environment}
    return subprocess.run([sys.executable, *command], cwd=folder, env=own, capture_output=True, text=True, timeout=240)


RUN_NOTEBOOK = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, "done.ipynb")
"""


def test_the_notebook_is_kept_with_outputs_of_these_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sees what each step changes and prints without running it: the present scripts, and nothing of a machine."""
    pytest.importorskip("IPython")
    monkeypatch.syspath_prepend(str(LAB))
    import notebook_support

    cells = [cell for cell in json.loads((LAB / "lab.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    shown = {"".join(cell["source"]): cell["outputs"] for cell in cells}
    for source, outputs in shown.items():
        assert not any(output["output_type"] == "error" for output in outputs), source
        if source.startswith("lab."):
            (output,) = outputs
            expected = eval(source, {"lab": notebook_support}).data
            assert "".join(output["data"]["text/markdown"]) == expected, f"{source}: run the notebook again"
        elif source.startswith("run("):
            printed = "".join("".join(output.get("text", "")) for output in outputs)
            assert "images/sec" in printed, source
    text = json.dumps([list(outputs) for outputs in shown.values()])
    assert not re.search(r"/home/|/root/|/tmp/|/work/", text), "a path of one machine"
    assert text.count("image/png") == 2, "both pictures"


@repeats
def test_the_notebook_runs(images: Path, tmp_path: Path) -> None:
    """With the last step under horovodrun: there only rank 0 speaks, and in whole lines."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    environment = {
        "LAB_OPTIONS": f"{SMALL} --epochs 2 --data {shlex.quote(str(images))}",
        "LAB_STEPS": "10",
        "LAB_LOGS": str(tmp_path / "logs"),
    }
    done = start(["-c", RUN_NOTEBOOK, str(LAB / "lab.ipynb"), str(LAB)], tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    outputs = [
        output
        for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"]
        for output in cell.get("outputs", [])
    ]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    runs = re.findall(
        r"^\$ horovodrun -np (\d) python fashion_mnist_after_step_(\d+)\.py .*\n((?:\[.*\n)+)", printed, re.M
    )
    assert [(ranks, step) for ranks, step, _ in runs] == [("2", "10"), ("1", "05"), ("2", "05")]
    lines = runs[0][2].splitlines()
    assert all(line.startswith("[0]<stdout>:") for line in lines), printed
    assert sum("images/sec" in line for line in lines) == 2 and "test accuracy" in lines[-1]
    assert [row["epoch"] for row in rows(tmp_path / "logs" / "step-10")] == [1, 2]
    assert printed.count("test accuracy") == 3
    (rate,) = re.findall(r"2 ranks train ([\d.]+) times as many images per second as one", printed)
    assert float(rate) > 0
    drawn = re.findall(r"rank (\d) drew weights that sum to (\S+); those of rank 0 sum to (\S+)", printed)
    assert [rank for rank, _, _ in drawn] == ["0", "1"]
    assert drawn[0][1] == drawn[0][2] == drawn[1][2] != drawn[1][1]
    shown = ["".join(output["data"].get("text/markdown", "")) for output in outputs if "data" in output]
    assert sum(text.startswith("```diff") for text in shown) == 10
    assert any("+    hvd.callbacks.BroadcastGlobalVariablesCallback(0)," in text for text in shown)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
