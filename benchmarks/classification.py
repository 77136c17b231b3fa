"""Tells which package of the standard library a piece of source is from, against a linear baseline.

Pieces of 512 bytes of the 12 packages with the most files, at most 2,000 a package, held out by
file. The baseline is scikit-learn's `TfidfVectorizer()` with `LogisticRegression(max_iter=1000)`.
The model is a Llama of one block that starts from random weights; it trains on two ranks, on one,
and with an interruption.

    python benchmarks/classification.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

PACKAGES, MOST_PIECES, PIECE_BYTES, HELD_OUT = 12, 2000, 512, 0.2
RECIPE = """
[task]
name = "sequence_classification"
labels = {labels}
dropout = 0.1

[run]
steps = {steps}

[model]
dim = 96
n_layers = 1
n_heads = 4
n_kv_heads = 4
ffn_dim = 192

[tokenizer]
name = "bpe"
path = "tokenizer"

[data]
seq_len = 288
on_long = "truncate"
global_batch = 64
micro_batch = 32

[[data.sources]]
name = "jsonl"
path = "train.jsonl"

[[data.sources]]
name = "jsonl"
path = "validation.jsonl"
split = "validation"

[optimizer]
lr = 3e-3
weight_decay = 0.1

[schedule]
warmup_steps = 30
decay_fraction = 0.8

[evaluate]
interval = {half}
steps = 0

[[evaluate.metrics]]
name = "accuracy"

[checkpoint]
interval = {half}
keep = 9
"""


def collect_pieces() -> dict[str, list[dict[str, str]]]:
    """Return pieces of source with the package that each is from, by split."""
    root = Path(sysconfig.get_path("stdlib"))
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        package, *below = path.relative_to(root).parts
        if below and package != "site-packages":
            files[package].append(path)
    draw, splits = random.Random(0), {"train": [], "validation": []}  # type: Any
    for package in sorted(files, key=lambda name: (-len(files[name]), name))[:PACKAGES]:
        draw.shuffle(files[package])
        border = round(len(files[package]) * HELD_OUT)
        pieces: dict[str, list[dict[str, str]]] = {"validation": [], "train": []}
        for number, path in enumerate(files[package]):
            text = path.read_bytes()
            for start in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
                piece = text[start : start + PIECE_BYTES].decode(errors="ignore")
                split = "validation" if number < border else "train"
                pieces[split].append({"text": piece, "label": package})
        for split, share in (("train", 1 - HELD_OUT), ("validation", HELD_OUT)):
            draw.shuffle(pieces[split])
            splits[split] += pieces[split][: round(MOST_PIECES * share)]
    return splits


def run_trainer(folder: Path, *words: str) -> None:
    """Run a command of the trainer in a folder, one thread a rank."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "trainer", *words]
    subprocess.run(command, cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL)


def read_rows(folder: Path, name: str) -> dict[tuple[str, int], tuple[float, ...]]:
    """Return loss and accuracy of each row of a run."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return {(r["kind"], r["step"]): (r["loss"], r.get("accuracy", 0.0)) for r in rows}


def main() -> None:
    """Print the accuracies on the held-out files, and the seconds that they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    steps = parser.parse_args().steps
    splits = collect_pieces()
    texts, labels = (
        {name: [row[key] for row in rows] for name, rows in splits.items()}
        for key in ("text", "label")
    )
    majority = Counter(labels["validation"]).most_common(1)[0][1] / len(labels["validation"])
    started = time.perf_counter()
    vectorizer = TfidfVectorizer()
    linear = LogisticRegression(max_iter=1000)
    linear.fit(vectorizer.fit_transform(texts["train"]), labels["train"])
    score = linear.score(vectorizer.transform(texts["validation"]), labels["validation"])
    print(f"{len(texts['train']):,} pieces to learn from, {len(texts['validation']):,} held out")
    print(f"majority class {majority:.1%}")
    print(f"TF-IDF with logistic regression {score:.1%}, {time.perf_counter() - started:.0f} s")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, rows in splits.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names = json.dumps(sorted(set(labels["train"])))
        recipe = RECIPE.format(labels=names, steps=steps, half=steps // 2)
        (folder / "two.toml").write_text(recipe)
        started = time.perf_counter()
        words = ("train.jsonl", "--vocab-size", "8192", "--out", "tokenizer")
        run_trainer(folder, "data", "train-tokenizer", *words)
        run_trainer(folder, "run", "two.toml", "--nproc", "2")
        seconds = time.perf_counter() - started
        two = read_rows(folder, "two")
        loss, accuracy = two["eval", steps]
        print(f"2 ranks: accuracy {accuracy:.1%}, loss {loss:.4f}, {seconds:.0f} s with tokenizer")
        shutil.rmtree(folder / f"runs/two/checkpoints/step-{steps:08}")
        run_trainer(folder, "run", "two.toml", "--nproc", "2")
        is_equal = read_rows(folder, "two") == two
        print(f"resumed after step {steps // 2}: {'bit-equal' if is_equal else 'DIFFERENT'}")
        run_trainer(folder, "run", "two.toml", "--set", 'run.name="one"')
        loss, accuracy = read_rows(folder, "one")["eval", steps]
        print(f"1 rank: accuracy {accuracy:.1%}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
