"""A corpus for preparations, in many small parts."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from trainer.engine.corpus.prepare import Preparation, prepare_folder
from trainer.engine.corpus.progress import TokenisingProgress
from trainer.engine.sources import documents, files
from trainer.engine.sources.configs import DocumentSource, JsonlSource
from trainer.engine.sources.documents import Document, DocumentFault
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.tokenizer import MaskedDocument

SMALL = 20_000


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (documents, files):
        monkeypatch.setattr(module, "PART_BYTES", SMALL)


class MarkedSource(DocumentSource):
    """Plain documents first, then some of which a part is learned, and a fault in each part."""

    name: Literal["marked"] = "marked"

    def parts(self) -> Sequence[Any]:
        return range(6)

    def read(self, part: Any) -> Iterator[Document]:
        for number in range(50):
            text = f"part {part} document {number} " * 5
            yield MaskedDocument(text, ((3, 9), (20, len(text)))) if part > 2 else text
        yield DocumentFault("somewhere", f"broken {part}")
        yield ""

    def fingerprint(self) -> str:
        return "marked"


def corpus(folder: Path, megabytes: float = 0.4) -> JsonlSource:
    file = folder / "corpus.jsonl"
    draw = random.Random(0)
    with open(file, "w") as opened:
        while opened.tell() < megabytes * 1e6:
            words = [draw.choice(["red", "blau", "vert", "été", "☃"]) for _ in range(99)]
            opened.write(json.dumps({"text": " ".join(words[: draw.randrange(99)])}) + "\n")
    return JsonlSource(path=str(file))


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def made(folder: Path, *documents: DocumentSource, workers: int = 2, shard: int = 2**16) -> Path:
    seen: list[TokenisingProgress] = []
    job = Preparation(documents, ByteTokenizer(), "bytes", shard, workers)
    assert prepare_folder(job, folder, seen.append)
    assert seen[-1].parts_done == len(job.parts())
    return folder


def parts_of(out: Path) -> list[Path]:
    return list((out.with_name(f"{out.name}.unfinished") / "parts").glob("???????"))
