"""Speed of `trainer data prepare` beside the bare tokenizers, on the same cores.

The bare ones encode texts that are in memory, in batches, and hand back the ids as arrays. Ours
reads JSON lines, tokenises by processes, and leaves checksummed files synced to disk. They take
turns, so that all see the same load.

    python benchmarks/prepare.py --write
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import results

from trainer.engine.corpus.prepare import Preparation, prepare_folder
from trainer.engine.corpus.train_tokenizer import train_tokenizer
from trainer.engine.sources.configs import JsonlSource
from trainer.engine.sources.python_library import PythonSource
from trainer.engine.tokenizers.fast_bpe import FastBPE
from trainer.engine.tokenizers.hf_tokenizer import HuggingFaceTokenizer

PROMISED = 0.9
"""of the bare tokenizer's speed"""
WAYS = ("wall", "processor")
BATCH = 1000
"""texts a call of the bare tokenizers, the size that the libraries' own examples use"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=140, help="size of the corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = list(corpus(arguments.megabytes))
        source = JsonlSource(path=str(folder / "corpus.jsonl"))
        with open(source.path, "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        train_tokenizer([PythonSource()], folder / "bpe", vocab_size=32_000, max_bytes=5 * 10**6)
        rounds = [measure(texts, source, folder) for _ in range(arguments.rounds)]
    tokens = rounds[0]["tokens"]
    cores = len(os.sched_getaffinity(0))
    ratios = {kind: ratio(rounds, kind) for kind in ("tokenizers", "tiktoken")}
    rows = [
        [name, *(f"{tokens / median_of(rounds, name, way) / 1e6:.2f}" for way in WAYS)]
        for name in rounds[0]
        if name != "tokens"
    ]
    print(results.table(["million tokens", "a second", "a CPU second"], rows))
    for kind, found in ratios.items():
        print(
            f"{kind}: {found['wall']:.2f} of the bare one's speed, "
            f"{found['processor']:.2f} by CPU time; promised {PROMISED}"
        )
    if arguments.write:
        measured = {"megabytes": arguments.megabytes, "tokens": tokens, "cores": cores}
        print(results.append("prepare", measured | {"rounds": rounds, "ratios": ratios}))


def ratio(rounds: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """Our speed over the bare tokenizer's: the median of the rounds."""
    return {
        way: round(
            statistics.median(r[f"bare {kind}"][way] / r[f"ours {kind}"][way] for r in rounds), 3
        )
        for way in WAYS
    }


def median_of(rounds: Sequence[dict[str, Any]], name: str, way: str) -> float:
    return statistics.median(each[name][way] for each in rounds)


def corpus(megabytes: int) -> Iterator[str]:
    """The standard library again and again, each time with other names, in pieces of 4 kB."""
    left, copy = megabytes * 10**6, 0
    while left > 0:
        copy += 1
        for document in PythonSource().documents():
            text = str(document).replace("self", f"this{copy}")
            for start in range(0, len(text), 4000):
                yield text[start : start + 4000]
                left -= 4000
                if left <= 0:
                    return


def measure(texts: Sequence[str], source: JsonlSource, folder: Path) -> dict[str, Any]:
    """Return wall and processor seconds of each baseline, one after another."""
    tokenizer, slow = HuggingFaceTokenizer(folder / "bpe"), HuggingFaceTokenizer(folder / "bpe")
    if "tiktoken" not in tokenizer.enable_fast_encoding():
        raise SystemExit(tokenizer.enable_fast_encoding())
    slow.encoder = "tokenizers"  # what `enable_fast_encoding` would choose, chosen already
    native, fast = slow._tokenizer, FastBPE(slow._tokenizer)
    counts: list[int] = []

    def bare_tokenizers() -> None:
        total = 0
        for batch in batches(texts):
            encodings = native.encode_batch_fast(batch, add_special_tokens=False)
            total += sum(len(np.array(each.ids, dtype=np.uint32)) for each in encodings)
        counts.append(total + len(texts))

    def bare_tiktoken() -> None:
        total, encoding = 0, fast._encoding
        threads = len(os.sched_getaffinity(0))
        for batch in batches(texts):
            ids = encoding.encode_ordinary_batch(batch, num_threads=threads)
            total += sum(len(np.array(each, dtype=np.uint32)) for each in ids)
        counts.append(total + len(texts))

    def ours(which: HuggingFaceTokenizer) -> Callable[[], None]:
        def run() -> None:
            prepare_folder(Preparation([source], which), folder / "out", lambda _: None)
            counts.append(json.loads((folder / "out" / "tokens.json").read_text())["num_tokens"])
            shutil.rmtree(folder / "out")

        return run

    baselines = {
        "bare tokenizers": bare_tokenizers,
        "ours tokenizers": ours(slow),
        "bare tiktoken": bare_tiktoken,
        "ours tiktoken": ours(tokenizer),
    }
    found: dict[str, Any] = {name: timed(run) for name, run in baselines.items()}
    if len({*counts}) != 1:
        raise SystemExit(f"they do not make as many tokens: {counts}")
    return {**found, "tokens": counts[0]}


def batches(texts: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(texts), BATCH):
        yield list(texts[start : start + BATCH])


def timed(run: Callable[[], None]) -> dict[str, float]:
    began, spent = time.perf_counter(), processor_seconds()
    run()
    wall, processor = time.perf_counter() - began, processor_seconds() - spent
    return {"wall": round(wall, 2), "processor": round(processor, 2)}


def processor_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
