"""Figures and pictures of the documents are those of published records, or come from a program that the picture names."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
FIGURE = re.compile(r"\b\d[\d.,]*\s*(?:ms|us|microseconds|milliseconds|GB/s|MB/s|images/s)\b|\b\d[\d.]* %")
"""What has been measured: a time shorter than a second, a rate, a share."""


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program, with the modules beside it; other tests do not see these."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("publish")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith((str(ROOT / "benchmarks"), str(ROOT / "docs"))):
            del sys.modules[name]


RECORD = {
    "machine": {
        "processor": "a processor", "cores": 2, "memory_gigabytes": 25, "python": "3.11.7", "torch": "2.13.0",
        "horovod": "0.28.1+pure.1", "busy_percent": 3.0, "date": "2026-11-24T10:00:00+00:00",
    },
    "ranks": 2,
    "models": [
        {
            "model": "mlp", "parameters": 25_200_000, "tensors": 14,
            "seconds": {"alone": [0.172, 0.171], "hvd": [0.17, 0.2], "ddp": [0.28, 0.272]},
        }
    ],
}  # fmt: skip


def test_tables_have_the_figures_of_their_records_and_nothing_else(
    publish: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "PUBLISHED", tmp_path)
    (tmp_path / "training.json").write_text(json.dumps(RECORD))
    before = "Text.\n\n<!-- published: training -->\nstale 99 ms\n<!-- end -->\n\nMore."
    after = publish.written(before)
    assert "| mlp, 25.2 M parameters | alone | 171 | 172 | 1.01 |" in after
    assert "|  | ddp | 272 | 276 | 1.60 |" in after
    assert "Horovod 0.28.1+pure.1, torch 2.13.0, Python 3.11.7; a processor, 2 cores, 3 % of them busy" in after
    assert "2026-11-24." in after and "stale" not in after
    assert after.startswith("Text.\n\n<!-- published") and after.endswith("<!-- end -->\n\nMore.")
    assert publish.written(after) == after


def test_the_cost_of_observing_is_a_median_with_an_interval(publish: ModuleType) -> None:
    ratios = [1.0 + number / 1000 for number in range(-10, 11)]
    keys = ["step, default", "step, timeline", "step, all ranks", "step, off again"]
    keys += ["1 KB allreduce, default", "1 KB allreduce, off again"]
    direct = {
        "seconds_of_a_step": 0.1, "collectives": 2.0, "phases": 6.0, "append": 4e-7, "life": 1e-6, "phase": 2e-7,
        "report": 1e-3, "reports": 0.05, "small": 1e-4, "written": 8e-4, "written_of_all": 5e-4,
    }  # fmt: skip
    rows = list(publish.of_observing({"ranks": 2, "ratios": dict.fromkeys(keys, ratios), "direct": [direct]}))
    # Of 21 values, the 6th and the 16th enclose the median with a confidence of 97.3 %, the 7th and the 15th with 92.2 %.
    assert rows[2] == "| a step, with what is on by default | 0.00 % | -0.50 to 0.50 % | 21 |"
    assert "| a report for the watch | 1000.00 µs | 0.05 | 0.0500 % |" in rows
    assert "| all that is on by default |  |  | 0.0532 % |" in rows
    assert "| all that a timeline adds on rank 0, with 800 µs for its events |  |  | 1.000 % |" in rows


def test_a_row_of_slow_links_is_steps_times_seconds_beside_one_host(publish: ModuleType) -> None:
    def row(contender: str, link: str, steps: list[int], projected: float, confirmed: float = 0.0) -> dict[str, object]:
        what = {"task": "digits", "contender": contender, "link": link, "steps": steps, "share": 0.4}
        return what | {"step_seconds": 0.05, "projected": projected, "confirmed": confirmed}

    results = [
        row("one", "1gbit", [800, 1000], 45.0),
        row("local", "1gbit", [300, 300], 15.0, confirmed=14.6),
        row("lost", "1gbit", [0, 0], 0.0),
    ]
    table = list(publish.of_slow_links({"hosts": 4, "one": "one", "share": 0.5, "results": results}))
    assert table[2:5] == [
        "| digits: one | 800, 1000 | 50 (40) | 45 | 1.00 |",
        "| digits: local | 300, 300 | 50 (40) | 15 | 3.00 |",
        "| digits: lost | 0, 0 | 50 (40) | not reached | |",
    ]
    assert table[-1].endswith("digits, local: 14.6 s with the first seed, where the product is 15.0 s.")


def test_what_autotuning_chose_is_compared_with_the_best_by_hand(publish: ModuleType) -> None:
    autotune = importlib.import_module("autotune")
    by_hand = {autotune.shown(each): [4.0, 5.0] for each in autotune.BY_HAND}
    best = next(iter(by_hand))
    speeds = {"bad": [2.0, 2.0], "chosen": [4.9, 4.8], **by_hand, best: [5.0, 5.0]}
    rows = list(publish.of_autotuning({"ranks": 2, "speeds": speeds, "said": "autotuning is over"}))
    assert "| where it began | 2.00 | 40 % |" in rows and "| what autotuning chose | 4.85 | 97 % |" in rows
    assert f"| {best} | 5.00 | 100 % |" in rows and rows[-1] == "    autotuning is over"


def test_a_table_of_collectives_has_a_row_for_each_operation_and_a_column_for_each_size(publish: ModuleType) -> None:
    steps = [{"model": "mlp", "horovod": 0.1, "gloo": 0.15, "silent": 0.08, "ratio": 1.5}]
    moved = [
        {"operation": name, "bytes": size, "horovod": seconds, "gloo": 2 * seconds, "ratio": 2.0, "fastest": 2.1}
        for size, seconds in ((1 << 20, 2e-3), (64 << 10, 1e-4))
        for name in ("all_reduce", "broadcast")
    ]
    record = {"machine": RECORD["machine"], "ranks": 2, "training": steps, "collectives": moved}
    assert list(publish.TABLES["torch_distributed"](record)) == [
        "| a step of DDP on 2 ranks | ms on horovod | ms on gloo | ms without communication | time on gloo / time on horovod |",
        "|---|---:|---:|---:|---:|",
        "| mlp | 100 | 150 | 80 | 1.50 |",
        "",
        "| ms on horovod; time on gloo / time on horovod | 64 KiB | 1 MiB |",
        "|---|---:|---:|",
        "| `all_reduce` | 0.10; 2.0 | 2.00; 2.0 |",
        "| `broadcast` | 0.10; 2.0 | 2.00; 2.0 |",
    ]


def test_a_picture_is_that_of_its_record(publish: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setitem(publish.PICTURES, "training", lambda _, path: image.new("RGB", (2, 2)).save(path))
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "IMAGES", tmp_path)
    record = tmp_path / "training.json"
    record.write_text(json.dumps(RECORD))
    publish.draw(record)
    assert publish.marked(tmp_path / "training.png")["Source"] == publish.source(record)
    record.write_text(json.dumps({**RECORD, "ranks": 3}))
    assert publish.marked(tmp_path / "training.png")["Source"] != publish.source(record)


def test_documents_have_the_tables_of_published_records(publish: ModuleType) -> None:
    for document in publish.documents():
        text = document.read_text()
        assert publish.written(text) == text, f"{document.name} differs from its records: make publish"
    for record in publish.PUBLISHED.glob("*.json"):
        publish.check(json.loads(record.read_text()), record)


def test_no_published_record_is_of_a_busy_machine(publish: ModuleType) -> None:
    busy = {
        path.name: share
        for path in publish.PUBLISHED.glob("*.json")
        if (share := json.loads(path.read_text())["machine"]["busy_percent"]) > 5
    }
    assert not busy, "measure them again on a machine that does nothing else"


def test_records_of_a_busy_machine_are_refused(
    publish: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, published = tmp_path / "results", tmp_path / "published"
    results.mkdir()
    monkeypatch.setattr(publish, "PUBLISHED", published)
    (results / "elastic.json").write_text(json.dumps(RECORD))
    (results / "training.json").write_text(
        json.dumps({**RECORD, "machine": {**RECORD["machine"], "busy_percent": 5.5}})
    )
    with pytest.raises(
        SystemExit, match=r"training\.json: 5\.5 % of its machine were busy.*no record with more than 5 %.*again"
    ):
        publish.take_over(results)
    assert not published.exists(), "all or none"
    (results / "training.json").write_text(
        json.dumps({**RECORD, "machine": {**RECORD["machine"], "busy_percent": 5.0}})
    )
    publish.take_over(results)
    assert sorted(path.name for path in published.iterdir()) == ["elastic.json", "training.json"]


def test_the_table_of_recoveries_and_its_picture_have_the_loss_of_the_median_time(publish: ModuleType) -> None:
    elastic = importlib.import_module("elastic")
    found = [{"met": seconds, "step": 0.1} for seconds in (0.5, 0.1, 0.9, 0.3)]
    assert elastic.median_loss(found) == {"met": 0.3, "step": 0.1}
    assert elastic.median_loss(found[:3]) == {"met": 0.5, "step": 0.1}
    record = {"ranks": 4, "seconds": {"horovodrun": found, "torchrun": found[:3]}}
    assert list(publish.of_recovery(record))[2:] == [
        "| horovodrun | the other 3 ranks | 0.40 | 4 |",
        "| torchrun | 4 new ranks | 0.60 | 3 |",
    ]


def test_the_picture_of_a_hang_is_of_the_program_on_its_page(
    publish: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    pictures = importlib.import_module("pictures")
    program, settings = pictures.program_that_hangs()
    assert "hvd.rank() != 1" in program and settings
    assert publish.marked(publish.IMAGES / "hang.png")["Source"].endswith(f"; program {pictures.checksum(program)}"), (
        "python docs/pictures.py"
    )


def test_every_picture_says_where_it_is_from(publish: ModuleType) -> None:
    pytest.importorskip("PIL.Image")
    shown = {
        (document.parent / link).resolve()
        for document in publish.documents()
        for link in PICTURE.findall(document.read_text())
    }
    assert shown == set(publish.IMAGES.iterdir()), "every picture is shown somewhere, and every shown one is there"
    assert shown
    for path in shown:
        source = publish.marked(path).get("Source", "")
        program, _, rest = source.partition(";" if source.startswith("docs/") else " ")
        assert (ROOT / program).is_file(), f"{path.name} names no program or record that made it"
        if program.startswith("benchmarks/published/"):
            assert publish.source(ROOT / program) == source, f"{path.name} is not of its record: make publish"
        else:
            assert re.fullmatch(r" Horovod \S+, \d{4}-\d\d-\d\d; program [0-9a-f]{16}", rest), (
                f"{path.name} has no version and date"
            )


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md", "docs/elastic.md", "docs/limits.md"])
def test_no_figure_stands_outside_of_a_published_table(name: str, publish: ModuleType) -> None:
    text = publish.BLOCK.sub("", (ROOT / name).read_text())
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [match for match in FIGURE.findall(text) if match != "100 %"]
    assert not found, f"{name}: {found}"
