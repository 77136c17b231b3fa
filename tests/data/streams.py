"""Streaming sources of each kind, and what their rows are."""

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from xxhash import xxh3_64_intdigest

from trainer.engine.core.hashing import GOLDEN, mix
from trainer.engine.data.batch import TokenBatch
from trainer.engine.data.dataset import OpenedData, open_data
from trainer.engine.data.loader import Loader
from trainer.engine.data.order import permute
from trainer.engine.data.tables import Data
from trainer.engine.sources.configs import JsonlSource, SourceConfig, TextSource
from trainer.engine.sources.hub import HFSource
from trainer.engine.sources.parquet import ParquetSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

SEQ_LEN, WINDOW = 16, 1000
CHANCE = random.Random(0)
TEXTS = [f"<{number}>" + "abcdefghij" * CHANCE.randrange(9) for number in range(300)]


def source_of(
    kind: str, folder: Path, texts: list[str] = TEXTS, **settings: object
) -> SourceConfig:
    """The texts in two files of a kind, as a streaming source."""
    folder.mkdir(exist_ok=True)
    for name, some in (("a", texts[:200]), ("b", texts[200:])):
        if kind == "jsonl":
            lines = [json.dumps({"text": text}) + "\n" for text in some]
            (folder / f"{name}.jsonl").write_text("".join(lines))
        elif kind == "parquet":
            pq.write_table(pa.table({"text": some}), folder / f"{name}.parquet", row_group_size=37)
        elif kind == "hf":
            Dataset.from_dict({"text": some}).to_parquet(folder / f"{name}.parquet")
        elif kind == "text":
            for number, text in enumerate(some):
                (folder / f"{name}{number:04d}.txt").write_text(text)
    if kind == "saved":
        Dataset.from_dict({"text": texts}).save_to_disk(folder)
    classes = {"jsonl": JsonlSource, "parquet": ParquetSource, "text": TextSource}
    made = classes.get(kind, HFSource)
    return made(path=str(folder), **{"streaming": True, **settings})


def table(sources: list[SourceConfig], cache: Path, **changes: object) -> Data:
    return Data.model_validate(
        {
            "seq_len": SEQ_LEN,
            "global_batch": 24,
            "micro_batch": 4,
            "sources": sources,
            "cache_dir": str(cache),
            "worker_timeout_seconds": 120,
            **changes,
        }
    )


def opened(data: Data, seed: int = 5) -> OpenedData:
    return open_data(data, ByteTokenizer(), seed, "run")


def steps_of(data: Data, count: int, *, first: int = 0, rank: int = 0, ranks: int = 1, state=None):
    """Rows of some steps as bytes."""
    train = opened(data).train
    train.restore(state or {})
    steps = islice(Loader(train, data, rank, ranks).steps(first), count)
    return [[row for batch in step for row in rows_of(batch)] for step in steps]


def rows_of(batch: TokenBatch) -> list[bytes]:
    columns = [batch.tokens, batch.labels, batch.positions, batch.document_ids]
    arrays = [column.numpy() for column in columns if column is not None]
    return [b"".join(array[row].tobytes() for array in arrays) for row in range(len(batch.tokens))]


def expected_rows(texts: list[str], count: int, *, shuffle: bool = True) -> list[list[int]]:
    """The first tokens of a stream as one would write it down: no files, processes or numpy."""
    rows: list[list[int]] = []
    number = 0
    key = xxh3_64_intdigest(b"5 0")
    while len(rows) < count:
        waiting = list(texts)
        while waiting:
            size = min(WINDOW << number, 2 * WINDOW)
            tokens: list[int] = []
            taken = 0
            while waiting and taken < size:
                taken += len(waiting[0])
                tokens += [*waiting.pop(0).encode(), 256]
            starts = range(0, len(tokens) - SEQ_LEN, SEQ_LEN)
            window = [tokens[start : start + SEQ_LEN + 1] for start in starts]
            if shuffle:
                keys = mix(np.array([(key + number * int(GOLDEN)) % 2**64], np.uint64))
                order = permute(
                    np.arange(len(window), dtype=np.uint64),
                    len(window),
                    np.repeat(keys, len(window)),
                )
                window = [window[int(index)] for index in order]
            rows += window
            number += 1
    return rows[:count]
