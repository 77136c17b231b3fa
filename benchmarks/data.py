"""Million tokens per CPU second on one thread, from memory-mapped file to int64 tensors.

Random rows, read bare and by each packing in turns, so that all see the same load; then the whole
step through two worker processes.

    python benchmarks/data.py --write
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import results
import torch

from trainer.engine.corpus.configs import TokensSource
from trainer.engine.corpus.manifest import TOKENS, shard_name
from trainer.engine.corpus.store import StoreWriter
from trainer.engine.corpus.tokenise import make_chunk
from trainer.engine.data.batch import TokenBatch
from trainer.engine.data.dataset import open_data
from trainer.engine.data.loader import Loader
from trainer.engine.data.packing import PACKINGS
from trainer.engine.data.tables import Data
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

PROMISED = 40
"""million tokens per CPU second"""
ROWS = 8
"""rows a batch"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million-tokens", type=int, default=128, help="size of the file")
    parser.add_argument("--mean-document", type=int, default=600, help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="CPU time of a turn")
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        write_corpus(corpus, arguments.million_tokens * 10**6, arguments.mean_document)
        rates = {
            seq_len: measure(corpus, seq_len, arguments.rounds, arguments.seconds)
            for seq_len in (256, 1024, 2048)
        }
        workers = {seq_len: through_workers(corpus, seq_len) for seq_len in rates}
    names = list(next(iter(rates.values())))
    heads = ["million tokens / CPU s", *(f"{ROWS} x {seq_len}" for seq_len in rates)]
    lines = [[name, *(f"{rates[size][name]:.0f}" for size in rates)] for name in names]
    lines += [
        [f"concat, 2 workers, {key}", *(f"{workers[size][key]:.1f}" for size in rates)]
        for key in ("all processes", "wall")
    ]
    print(results.table(heads, lines))
    slowest = min(rates[size][name] for size in rates for name in names if name != "bare memmap")
    print(f"slowest packing {slowest:.0f}; promised {PROMISED}")
    if arguments.write:
        measured = {"million_tokens": arguments.million_tokens, "rows": ROWS}
        measured |= {"rates": rates, "workers": workers}
        print(results.append("data", measured))


def write_corpus(folder: Path, num_tokens: int, mean_document: int) -> None:
    """Random bytes in documents of random length."""
    random = np.random.default_rng(0)
    with StoreWriter(folder, ByteTokenizer()) as writer:
        while writer.num_tokens < num_tokens:
            lengths = random.geometric(1 / mean_document, 4096)
            data = random.integers(0, 256, lengths.sum(), dtype=np.uint8)
            chunk = make_chunk(ByteTokenizer(), np.split(data, np.cumsum(lengths)[:-1]))
            writer.write(chunk)
        writer.finish()


def measure(corpus: Path, seq_len: int, rounds: int, seconds: float) -> dict[str, float]:
    """Median rate of each reader over the rounds, in million tokens per CPU second."""
    readers: dict[str, Callable[[], object]] = {"bare memmap": bare(corpus, seq_len)}
    for packing in PACKINGS:
        readers[packing] = steps(corpus, seq_len, packing, workers=0).__next__
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds):
        for name, read in readers.items():
            read()
            batches, started = 0, time.process_time()
            while (spent := time.process_time() - started) < seconds:
                read()
                batches += 1
            rates[name].append(batches * ROWS * seq_len / spent / 1e6)
    return {name: round(statistics.median(found), 1) for name, found in rates.items()}


def bare(corpus: Path, seq_len: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Rows at random places, as a script would read them."""
    tokens = np.memmap(corpus / shard_name(TOKENS, 0), dtype=np.uint16, mode="r")
    random = np.random.default_rng(0)

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        starts = random.integers(0, len(tokens) - seq_len - 1, ROWS)
        rows = [tokens[start : start + seq_len + 1].astype(np.int64) for start in starts]
        inputs = torch.stack([torch.from_numpy(row[:-1]) for row in rows])
        labels = torch.stack([torch.from_numpy(row[1:]) for row in rows])
        return inputs, labels

    return read


def steps(corpus: Path, seq_len: int, packing: str, workers: int) -> Iterator[list[TokenBatch]]:
    table = Data.model_validate(
        {
            "seq_len": seq_len,
            "global_batch": ROWS,
            "micro_batch": ROWS,
            "packing": packing,
            "workers": workers,
            "sources": [TokensSource(path=str(corpus))],
        }
    )
    return Loader(open_data(table, ByteTokenizer(), 0).train, table, 0, 1).steps(0)


def through_workers(corpus: Path, seq_len: int, batches: int = 500) -> dict[str, float]:
    """Rate from start to end, workers' start included, in million tokens a second."""
    began, spent = time.perf_counter(), processor_seconds()
    with closing(steps(corpus, seq_len, "concat", workers=2)) as reading:
        for _ in range(batches):
            next(reading)
    tokens = batches * ROWS * seq_len / 1e6
    wall, processor = time.perf_counter() - began, processor_seconds() - spent
    return {"all processes": round(tokens / processor, 1), "wall": round(tokens / wall, 1)}


def processor_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
