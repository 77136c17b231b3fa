"""Print the measured numbers of benchmarks/README.md, from the newest results of each benchmark.

python benchmarks/summary.py
python benchmarks/summary.py --write   # puts them into both READMEs, as each benchmark does
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

from results import FOLDER

HERE = Path(__file__).parent
VOCABULARIES = (2048, 32000)
BASELINES = {
    "bare fp32": "bare torch loop in fp32",
    "best known loop": "the best loop that we know",
    "trainer default": "**trainer**, default settings",
    "trainer bf16 compiled": "**trainer**, compiled",
    "trainer fp32": "**trainer**, fp32",
    "transformers default": "transformers Trainer, default settings",
    "transformers best": "transformers Trainer, at its best",
    "litgpt default": "litgpt, default settings",
    "litgpt best": "litgpt, at its best",
    "torchtitan default": "torchtitan, default settings",
    "torchtitan best": "torchtitan, at its best",
    "OLMo-core default": "OLMo-core, default settings",
    "OLMo-core best": "OLMo-core, at its best",
}


def newest(benchmark: str, **wanted: Any) -> dict[str, Any]:
    """Return the last line of a benchmark's results with these values."""
    lines = map(json.loads, (FOLDER / f"{benchmark}.jsonl").read_text().splitlines())
    found: dict[str, Any] = [
        line for line in lines if all(line[key] == value for key, value in wanted.items())
    ][-1]
    return found


def step_table() -> str:
    """Return CPU time against the bare loop, and peak memory, as Markdown."""
    columns = [
        {each["name"]: each for each in newest("step_time", vocab=vocab)["baselines"]}
        for vocab in VOCABULARIES
    ]
    heads = "".join(f" vocabulary {vocab:,} |" for vocab in VOCABULARIES)
    rows = [f"| one optimizer step |{heads}", "|---|" + "---|" * len(columns)]
    for name, words in BASELINES.items():
        measured = [each.get(name) for each in columns]
        cells = [
            f" {each['ratio']:.2f}, {each['peak_mib']:,} MiB |" if each else " |"
            for each in measured
        ]
        rows.append(f"| {with_version(words, measured)} |" + "".join(cells))
    return "\n".join(rows)


def with_version(words: str, measured: list[dict[str, Any] | None]) -> str:
    """Return the words with the version of another project that was measured."""
    found = [each.get("versions", {}) for each in measured if each]
    others = [version for each in found for name, version in each.items() if name != "torch"]
    return words.replace(",", f" {others[-1]},", 1) if others else words


def sentences() -> str:
    """Return the other benchmarks' main numbers, a list item each."""
    start = {each["name"]: each for each in newest("startup")["commands"]}
    first_step = start["trainer run, first step"]["wall_ratio"]
    rates = newest("data")["rates"]["256"]
    saves, converted = newest("checkpoint"), newest("convert")
    prepared, streamed = newest("prepare")["ratios"], newest("streaming")
    items = [
        (
            f"From the command line to the first step: {first_step:.2f} times `import torch` "
            f"alone. `--help` takes {start['trainer --help']['wall_s']:.2f} s, `validate` "
            f"{start['trainer validate']['wall_s']:.2f} s."
        ),
        (
            f"Rows of 256 tokens from a memory-mapped file, in million tokens per CPU second: "
            f"{rates['concat']:.0f} with `concat`, {rates['documents']:.0f} with `documents`, "
            f"{rates['bare memmap']:.0f} by slicing a memmap row by row."
        ),
        (
            f"An asynchronous save of {saves['gigabytes']:.0f} GB keeps training waiting for "
            f"{1e3 * saves['blocked_seconds']:.1f} ms, a synchronous one for "
            f"{saves['sync_seconds']:.1f} s."
        ),
        (
            f"`data prepare` tokenises at {prepared['tokenizers']['wall']:.1f} times the speed of "
            f"the tokenizers library's batches on the same cores, and with tiktoken at "
            f"{prepared['tiktoken']['wall']:.1f} times tiktoken's. A step on a stream takes "
            f"{streamed['CPU seconds, streamed / prepared']:.2f} times the CPU time of one on "
            "prepared tokens."
        ),
        (
            f"Converting a checkpoint of {converted['gigabytes']:.0f} GB from Hugging Face's "
            f"format takes {1 / converted['hf2dcp']['speed_ratio']:.2f} times as long as copying "
            f"the file, to it {1 / converted['dcp2hf']['speed_ratio']:.2f} times, in "
            f"{converted['hf2dcp']['peak_bytes'] / 2**20:.0f} MiB of memory."
        ),
    ]
    return "\n".join(fill(item, 118, initial_indent="- ", subsequent_indent="  ") for item in items)


def update_documents() -> None:
    """Put the newest numbers in place of the older ones."""
    table = r"\| one optimizer step \|.*?(?=\n\n)"
    for file, pattern, text in [
        (HERE.parent / "README.md", table, step_table()),
        (HERE / "README.md", table + r"\n\n- From the .*", f"{step_table()}\n\n{sentences()}\n"),
    ]:
        old = file.read_text()
        if not re.search(pattern, old, re.DOTALL):
            raise SystemExit(f"{file} has no table of measured numbers")
        file.write_text(re.sub(pattern, lambda _, text=text: text, old, count=1, flags=re.DOTALL))


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        update_documents()
    print(f"{step_table()}\n\n{sentences()}")
