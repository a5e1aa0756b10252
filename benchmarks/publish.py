"""Publishes measurements: keeps the records of other programs, and writes their tables and pictures into the documents.

    python benchmarks/publish.py benchmarks/results     # take over the records of this folder, then write
    python benchmarks/publish.py                        # write tables and pictures anew from benchmarks/published

A record is a JSON file that a program here wrote (``--json``). It has the machine, the versions and the date. Documents have no
other figures: a table stands between the two comments that name its record, and a picture carries its record's checksum. A test
(``tests/examples/test_published.py``) compares them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import BUSY_PERCENT, is_busy

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "benchmarks" / "published"
IMAGES = ROOT / "docs" / "images"
BLOCK = re.compile(r"(<!-- published: ([\w-]+) -->\n).*?(\n?<!-- end -->)", re.DOTALL)
NEEDED = ("processor", "cores", "memory_gigabytes", "python", "horovod", "date", "busy_percent")
"""What a record must say of the machine it was made on."""

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="a folder with records")
    options = parser.parse_args()
    if options.results:
        take_over(options.results)
    for document in documents():
        text = document.read_text()
        if written(text) != text:
            document.write_text(written(text))
            print(f"wrote {document.relative_to(ROOT)}")
    for path in sorted(PUBLISHED.glob("*.json")):
        if path.stem in PICTURES:
            draw(path)


def take_over(results: Path) -> None:
    """Keep the records of a folder: all of them, or none if one is not to be published."""
    found = [path for path in sorted(results.glob("*.json")) if path.stem in TABLES]
    for path in found:
        check(json.loads(path.read_text()), path)
    PUBLISHED.mkdir(exist_ok=True)
    for path in found:
        (PUBLISHED / path.name).write_bytes(path.read_bytes())


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "api")])


def check(record: Record, path: Path) -> None:
    """End the program with a reason if a record is not to be published."""
    missing = [name for name in NEEDED if name not in record.get("machine", {})]
    if missing:
        sys.exit(f"{path}: its machine lacks {', '.join(missing)}; run the program that writes it again")
    if is_busy(record["machine"]):
        sys.exit(
            f"{path}: {record['machine']['busy_percent']} % of its machine were busy with other work; no record with more than "
            f"{BUSY_PERCENT:g} % is published: run the program that writes it again, on a machine that does nothing else"
        )


def written(text: str) -> str:
    """A document with the tables of all records that it names.

    Raises:
        FileNotFoundError: it names a record that is not published.
    """

    def table(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        record = json.loads((PUBLISHED / f"{name}.json").read_text())
        return "\n".join([start.rstrip(), "", *TABLES[name](record), "", in_words(record), "", end.strip()])

    return BLOCK.sub(table, text)


def in_words(record: Record) -> str:
    """The line under a table: what it was measured with, when and on what."""
    machine = record["machine"]
    versions = "".join(f", {name} {machine[name]}" for name in ("torch", "tensorflow", "keras") if name in machine)
    return (
        f"Horovod {machine['horovod']}{versions}, Python {machine['python']}; "
        f"{machine['processor']}, {machine['cores']} cores, "
        f"{machine['busy_percent']:.0f} % of them busy with other work; {machine['date'][:10]}."
    )


def of_training(record: Record) -> Iterator[str]:
    """One row an arrangement: the step times of the best and of the median round, and the best against Horovod's best."""
    yield f"| {record['ranks']} ranks | what | ms per step, best round | median round | best round, times Horovod's |"
    yield "|---|---|---:|---:|---:|"
    for model in record["models"]:
        best = {name: min(seconds) for name, seconds in model["seconds"].items()}
        for name, seconds in best.items():
            size = f"{model['model']}, {model['parameters'] / 1e6:.1f} M parameters" if name == "alone" else ""
            median = statistics.median(model["seconds"][name])
            ratio = seconds / best["hvd"]
            yield f"| {size} | {name} | {1e3 * seconds:.0f} | {1e3 * median:.0f} | {ratio:.2f} |"


def of_collectives(record: Record) -> Iterator[str]:
    """One row an operation and one column a size: the median time and the ratio to the peer's. Then the patterns."""
    from collectives_report import OURS, PATTERNS

    for job in record["jobs"]:
        medians = {(row["operation"], row["size"], row["contender"]): row["median"] for row in job["rows"]}
        operations = {row["operation"]: row["size"] for row in job["rows"] if row["contender"] == OURS}
        sizes = sorted({row["size"] for row in job["rows"] if row["operation"] not in PATTERNS})
        peer = next(row["contender"] for row in job["rows"] if row["contender"] != OURS)

        def cell(operation: str, size: int, medians: dict[Any, float] = medians, peer: str = peer) -> str:
            ours, theirs = (medians[operation, size, contender] for contender in (OURS, peer))
            return f"{1e6 * ours:,.0f}; {theirs / ours:.1f}"

        of = f"{job['ranks']} ranks, engine `{job['engine']}`: µs, and {peer} to horovod"
        yield f"| {of} | {' | '.join(map(in_units, sizes))} |"
        yield f"|---|{'---:|' * len(sizes)}"
        for operation in operations:
            if operation not in PATTERNS:
                yield f"| {operation} | {' | '.join(cell(operation, size) for size in sizes)} |"
        yield ""
        yield f"| {of} | |"
        yield "|---|---:|"
        for operation, size in operations.items():
            if operation in PATTERNS:
                yield f"| {operation} | {cell(operation, size)} |"


def in_units(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def of_recovery(record: Record) -> Iterator[str]:
    """One row a contender: from the kill of a rank to the next step."""
    from elastic import continued, median_loss

    yield f"| one of {record['ranks']} ranks is killed | goes on with | seconds to the next step, median | losses |"
    yield "|---|---|---:|---:|"
    for name, found in record["seconds"].items():
        seconds = sum(median_loss(found).values())
        yield f"| {name} | {continued(name, record['ranks'])} | {seconds:.2f} | {len(found)} |"
    if limits := [f"{name} with {text}" for name, text in record.get("limits", {}).items() if text]:
        yield ""
        yield f"Limits: {'; '.join(limits)}."


def of_many_ranks(record: Record) -> Iterator[str]:
    from many_ranks import table
    from scale_model import network_in_words

    yield from table(record)
    yield ""
    yield network_in_words(record)


def of_scale(record: Record) -> Iterator[str]:
    """One row a measurement of rank 0."""
    from scale_report import table

    yield from table(record)


def of_observing(record: Record) -> Iterator[str]:
    """One row a thing that is on, in turns, and one a part of it by itself."""
    from observe_cost_report import table

    yield from table(record)


def of_autotuning(record: Record) -> Iterator[str]:
    """One row a setting, and the line that the job has said."""
    from autotune import judged

    yield f"| {record['ranks']} ranks, the MLP | steps a second | of the best set by hand |"
    yield "|---|---:|---:|"
    for name, speed, ratio in judged(record):
        named = {"bad": "where it began", "chosen": "what autotuning chose"}.get(name, name)
        yield f"| {named} | {speed:.2f} | {100 * ratio:.0f} % |"
    yield ""
    yield f"    {record['said']}"


def of_hosts(record: Record) -> Iterator[str]:
    """One row an engine on a link: the plain sockets beside it, the tensor, its share of their speed, the gradients."""
    size = record["bytes"]
    whole = f"{in_units(size)} allreduce, ms"
    yield f"| link, ranks | engine | plain sockets, ms | {whole} | share of the link | ResNet-50's gradients, ms |"
    yield "|---|---|---:|---:|---:|---:|"
    before = ""
    for row in record["results"]:
        link = "not limited" if row["rate"] == "none" else row["rate"].replace("gbit", " Gbit/s")
        link += f", {row['networks']} networks" * (row["networks"] > 1) + f", 2 x {row['ranks']}"
        share = row["received"] / size * row["socket"] / row["whole"]
        milliseconds = " | ".join(f"{1e3 * row[name]:.0f}" for name in ("socket", "whole"))
        shown = "" if link == before else link
        yield f"| {shown} | {row['engine']} | {milliseconds} | {100 * share:.0f} % | {1e3 * row['resnet']:.0f} |"
        before = link


def of_torch_distributed(record: Record) -> Iterator[str]:
    """A table of steps of DDP, and one of collectives, a row an operation and a column a size."""
    columns = {
        "horovod": "on horovod",
        "gloo": "on gloo",
        "horovod_views": "on horovod, `gradient_as_bucket_view`",
        "gloo_views": "on gloo, `gradient_as_bucket_view`",
        "optimizer": "`hvd.DistributedOptimizer`",
        "silent": "without communication",
    }
    measured = [name for name in columns if name in record["training"][0]]
    heads = " | ".join(f"ms {columns[name]}" for name in measured)
    yield f"| a step of DDP on {record['ranks']} ranks | {heads} | time on gloo / time on horovod |"
    yield f"|---|{'---:|' * (len(measured) + 1)}"
    for row in record["training"]:
        times = " | ".join(f"{1e3 * row[name]:.0f}" for name in measured)
        yield f"| {row['model']} | {times} | {row['gloo'] / row['horovod']:.2f} |"
    yield ""
    sizes = sorted({row["bytes"] for row in record["collectives"]})
    yield f"| ms on horovod; time on gloo / time on horovod | {' | '.join(map(in_units, sizes))} |"
    yield f"|---|{'---:|' * len(sizes)}"
    found = {(row["operation"], row["bytes"]): row for row in record["collectives"]}
    for operation in dict.fromkeys(row["operation"] for row in record["collectives"]):
        rows = [found[operation, size] for size in sizes]
        cells = [f"{1e3 * row['horovod']:.2f}; {row['gloo'] / row['horovod']:.1f}" for row in rows]
        yield f"| `{operation}` | {' | '.join(cells)} |"


def of_slow_links(record: Record) -> Iterator[str]:
    """One row a contender: the steps to the loss, and for each link a step and its processor time, the product of steps and
    seconds, and how often one host's speed."""
    links = list(dict.fromkeys(row["link"] for row in record["results"]))
    heads = " | ".join(f"{link}: ms a step (of a processor) | s | times one host" for link in links)
    yield f"| {record['hosts']} hosts | steps to the loss, by seed | {heads} |"
    yield f"|---|---|{'---:|' * 3 * len(links)}"
    found = {(row["task"], row["contender"], row["link"]): row for row in record["results"]}
    for task, contender in dict.fromkeys((row["task"], row["contender"]) for row in record["results"]):
        rows = [found[task, contender, link] for link in links]
        alone = [found[task, record["one"], link]["projected"] for link in links]
        cells = []
        for row, one in zip(rows, alone, strict=True):
            milliseconds = 1e3 * row["step_seconds"]
            step = f"{milliseconds:.0f} ({milliseconds * row['share'] / record['share']:.0f})"
            reached = f"{row['projected']:.0f} | {one / row['projected']:.2f}" if row["projected"] else "not reached |"
            cells.append(f"{step} | {reached}")
        yield f"| {task}: {contender} | {', '.join(map(str, rows[0]['steps']))} | {' | '.join(cells)} |"
    for row in record["results"]:
        if row["confirmed"]:
            yield ""
            yield (
                f"Trained to the end at {row['link']}: {row['task']}, {row['contender']}: {row['confirmed']:.1f} s with the "
                f"first seed, where the product is {row['steps'][0] * row['step_seconds']:.1f} s."
            )


def picture_of_training(record: Record, path: Path) -> None:
    from training_report import Result, plot

    results = [Result(each["model"], each["parameters"], each["tensors"], each["seconds"]) for each in record["models"]]
    plot(results, record["ranks"], record["machine"], path)


def picture_of_recovery(record: Record, path: Path) -> None:
    from elastic import plot

    plot(record, path)


def of_scale_liveness(record: Record) -> Iterator[str]:
    from scale_report import liveness_table

    return liveness_table(record)


def picture_of_scale(record: Record, path: Path) -> None:
    from scale_report import plot

    plot(record, path)


TABLES: dict[str, Callable[[Record], Iterator[str]]] = {
    "collectives": of_collectives,
    "training": of_training,
    "training-tensorflow": of_training,
    "training-keras": of_training,
    "training-on-loss": of_training,
    "hosts": of_hosts,
    "elastic": of_recovery,
    "many_ranks": of_many_ranks,
    "scale": of_scale,
    "scale_liveness": of_scale_liveness,
    "observe": of_observing,
    "autotune": of_autotuning,
    "torch_distributed": of_torch_distributed,
    "slow_links": of_slow_links,
}
PICTURES: dict[str, Callable[[Record, Path], None]] = {
    "training": picture_of_training,
    "training-tensorflow": picture_of_training,
    "training-keras": picture_of_training,
    "elastic": picture_of_recovery,
    "scale": picture_of_scale,
}


def draw(record: Path) -> None:
    path = IMAGES / f"{record.stem}.png"
    if path.exists() and marked(path).get("Source") == source(record):
        return
    PICTURES[record.stem](json.loads(record.read_text()), path)
    mark(path, source(record))
    print(f"drew {path.relative_to(ROOT)}")


def source(record: Path) -> str:
    """What a picture that was drawn from a record says of it."""
    return f"{record.relative_to(ROOT)} {hashlib.sha256(record.read_bytes()).hexdigest()[:16]}"


def mark(path: Path, words: str) -> None:
    """Write into a PNG file where it is from."""
    from PIL import Image, PngImagePlugin

    with Image.open(path) as image:
        image.load()
        texts = PngImagePlugin.PngInfo()
        texts.add_text("Source", words)
        image.save(path, pnginfo=texts)


def marked(path: Path) -> dict[str, str]:
    """The texts in a PNG file."""
    from PIL import Image

    with Image.open(path) as image:
        return {name: str(value) for name, value in image.info.items()}


if __name__ == "__main__":
    main()
