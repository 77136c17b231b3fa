"""What a stream costs training: CPU and wall seconds of a step beside those on prepared tokens.

The same model trains on the same JSON lines, prepared and streamed, in turns within one process.
The stream's own process is measured too: its memory, and what it keeps on disk.

    python benchmarks/streaming.py --write
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import results
import torch

from trainer.engine.assemble.assemble import assemble
from trainer.engine.data.stream import Stream
from trainer.engine.launch.environment import find_world
from trainer.engine.recipe.load import load_recipe
from trainer.engine.train.parts import Parts

RECIPE = """
[run]
steps = 100000
dir = "{folder}"
name = "{name}"
[model]
dim = 128
n_layers = 2
[data]
seq_len = 256
global_batch = 8
cache_dir = "{folder}/cache"
validation_fraction = 0.0
[[data.sources]]
name = "jsonl"
path = "corpus.jsonl"
streaming = {streaming}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30, help="of a turn")
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl")
        parts = {kind: parts_of(folder, kind) for kind in ("prepared", "streamed")}
        steps = {kind: trained(each) for kind, each in parts.items()}
        first = {kind: seconds(each, 1)[1] for kind, each in steps.items()}
        turns: dict[str, list[tuple[float, float]]] = {kind: [] for kind in parts}
        for _ in range(arguments.rounds):
            for kind, each in steps.items():
                turns[kind].append(seconds(each, arguments.steps))
        (stream,) = parts["streamed"].data.turns[0].opened.train.streams.values()
        held = sum(path.stat().st_size for path in stream.producer.folder.rglob("*.bin"))
        memory = child_memory(stream)
    cpu, wall = (
        statistics.median(
            streamed[which] / prepared[which]
            for prepared, streamed in zip(turns["prepared"], turns["streamed"], strict=True)
        )
        for which in (0, 1)
    )
    milliseconds = 1000 * statistics.median(turn[0] for turn in turns["prepared"]) / arguments.steps
    lines = [
        ["CPU ms a step, prepared", f"{milliseconds:.1f}"],
        ["CPU seconds, streamed / prepared", f"{cpu:.3f}"],
        ["wall seconds, streamed / prepared", f"{wall:.3f}"],
        ["first step, streamed: s", f"{first['streamed']:.2f}"],
        ["memory of the stream's process: MiB", f"{memory / 2**20:.0f}"],
        ["tokens kept on disk: MiB", f"{held / 2**20:.0f}"],
    ]
    print(results.table(["", ""], lines))
    if arguments.write:
        results.append("streaming", {name: float(value) for name, value in lines})


def write_corpus(file: Path) -> None:
    """The standard library four times, a module a line."""
    texts = [
        path.read_text("utf-8", errors="replace")
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
        if "site-packages" not in path.parts
    ]
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(4):
            for text in texts:
                lines.write(json.dumps({"text": text}) + "\n")


def parts_of(folder: Path, kind: str) -> Parts:
    recipe = folder / f"{kind}.toml"
    streaming = "true" if kind == "streamed" else "false"
    recipe.write_text(RECIPE.format(folder=folder, name=kind, streaming=streaming))
    world = find_world()
    return assemble(load_recipe(recipe, world=1).recipe, world, torch.device("cpu"))


def trained(parts: Parts) -> Iterator[None]:
    """Train a step each time."""
    for batches in parts.loader.steps(0):
        parts.step.accumulate(batches)
        parts.step.update(1.0)
        parts.step.clear()
        yield


def seconds(steps: Iterator[None], count: int) -> tuple[float, float]:
    """Return the CPU seconds of this process and the wall seconds of some steps."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        next(steps)
    return time.process_time() - cpu, time.perf_counter() - wall


def child_memory(stream: Stream) -> int:
    """Return what is only the child's, its share of its parent's pages left out."""
    assert stream.child
    return int(psutil.Process(stream.child.pid).memory_full_info().uss)


if __name__ == "__main__":
    main()
