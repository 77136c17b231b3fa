"""Tells which package of the standard library a piece of source is from, against a linear baseline.

Pieces of 512 bytes of the 12 packages with the most files, at most 2,000 a package, held out by
file. The baseline is scikit-learn's `TfidfVectorizer()` with `LogisticRegression(max_iter=1000)`.
The model is a Llama of one block that starts from random weights. It trains on two ranks and on
one, each also with an interruption. The exit code is 1 if the model is more than 2 points below the
baseline, takes 3 minutes of two cores, differs between one and two ranks, or after an interruption.

    python benchmarks/classification.py --write
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import results
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

PACKAGES, MOST_PIECES, PIECE_BYTES, HELD_OUT = 12, 2000, 512, 0.2
MARGIN, MOST_SECONDS = 0.02, 180
EARLY_STEPS = 20
"""rows of which losses are compared between 1 and 2 ranks; later on rounding grows"""
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
interval = {quarter}
keep = 9

[metrics]
interval = 10
"""


def collect_pieces() -> dict[str, list[dict[str, str]]]:
    """Return pieces of source with the package that each is from, by split."""
    root = Path(sysconfig.get_path("stdlib"))
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        package, *below = path.relative_to(root).parts
        if below and package != "site-packages":
            files[package].append(path)
    draw, splits = random.Random(0), {"train": [], "validation": []}
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


def run_trainer(folder: Path, *words: str) -> float:
    """Run a command of the trainer in a folder, one thread a rank, and return its CPU seconds."""
    before = count_cpu_seconds()
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "trainer", *words]
    subprocess.run(command, cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL)
    return count_cpu_seconds() - before


def count_cpu_seconds() -> float:
    """Return the CPU seconds of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_rows(folder: Path, name: str) -> dict[tuple[str, int], tuple[float, ...]]:
    """Return loss, gradient norm and accuracy of each row of a run."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    keys = ("loss", "grad_norm", "accuracy")
    rows = map(json.loads, lines)
    return {(r["kind"], r["step"]): tuple(r.get(key, 0.0) for key in keys) for r in rows}


def score_baseline(splits: dict[str, list[dict[str, str]]]) -> dict[str, float]:
    """Return the held-out accuracies of the most frequent class and of the linear model."""
    texts, labels = (
        {name: [row[key] for row in rows] for name, rows in splits.items()}
        for key in ("text", "label")
    )
    vectorizer, linear = TfidfVectorizer(), LogisticRegression(max_iter=1000)
    linear.fit(vectorizer.fit_transform(texts["train"]), labels["train"])
    most = Counter(labels["validation"]).most_common(1)[0][1]
    return {
        "majority_class": most / len(labels["validation"]),
        "baseline": linear.score(vectorizer.transform(texts["validation"]), labels["validation"]),
    }


def train_and_resume(folder: Path, ranks: int, steps: int) -> dict[str, Any]:
    """Train on so many ranks, and again from a checkpoint after three quarters of the steps."""
    name = f"ranks-{ranks}"
    words = ("run", "recipe.toml", "--nproc", str(ranks), "--set", f'run.name="{name}"')
    seconds = run_trainer(folder, *words)
    rows = read_rows(folder, name)
    last = folder / f"runs/{name}/checkpoints/step-{steps:08}"
    shutil.rmtree(last)
    run_trainer(folder, *words)
    assert last.exists()
    is_equal = read_rows(folder, name) == rows
    print(
        f"ranks {ranks}: accuracy {rows['eval', steps][2]:.1%}, loss {rows['eval', steps][0]:.4f}, "
        f"{seconds:.0f} CPU s; resumed: {'bit-equal' if is_equal else 'DIFFERENT'}",
        flush=True,
    )
    return {"rows": rows, "seconds": seconds, "is_equal": is_equal}


def find_failures(measured: dict[str, Any], runs: dict[int, dict[str, Any]]) -> list[str]:
    """Return a sentence for each bar that is missed."""
    early = [place for place in runs[1]["rows"] if place[0] == "train" and place[1] <= EARLY_STEPS]
    apart = max(abs(runs[2]["rows"][place][0] / runs[1]["rows"][place][0] - 1) for place in early)
    accuracies = [measured[f"accuracy_{ranks}"] for ranks in runs]
    bars = {
        "the model is more than 2 points below the baseline": min(accuracies)
        >= measured["baseline"] - MARGIN,
        "the model takes more than 3 minutes of two cores": measured["seconds"] <= MOST_SECONDS,
        f"losses of 1 and 2 ranks differ by {apart:.1e}": apart <= 1e-3,
        "accuracies of 1 and 2 ranks differ by a point": max(accuracies) - min(accuracies) <= 0.01,
    }
    for ranks, run in runs.items():
        bars[f"a resumed run on {ranks} ranks differs"] = run["is_equal"]
    return [sentence for sentence, is_met in bars.items() if not is_met]


def main() -> None:
    """Print the accuracies on the held-out files, and the seconds that they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    steps, splits = options.steps, collect_pieces()
    sizes = {name: len(rows) for name, rows in splits.items()}
    print(f"{sizes['train']:,} pieces to learn from, {sizes['validation']:,} held out")
    measured: dict[str, Any] = {"steps": steps, "pieces": sizes, **score_baseline(splits)}
    print(f"majority class {measured['majority_class']:.1%}")
    print(f"TF-IDF with logistic regression {measured['baseline']:.1%}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, rows in splits.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names = json.dumps(sorted({row["label"] for row in splits["train"]}))
        recipe = RECIPE.format(labels=names, steps=steps, half=steps // 2, quarter=steps // 4)
        (folder / "recipe.toml").write_text(recipe)
        words = ("train.jsonl", "--vocab-size", "8192", "--out", "tokenizer")
        seconds = run_trainer(folder, "data", "train-tokenizer", *words)
        runs = {ranks: train_and_resume(folder, ranks, steps) for ranks in (2, 1)}
    for ranks, run in runs.items():
        measured[f"accuracy_{ranks}"] = run["rows"]["eval", steps][2]
    # CPU seconds do not depend on what else the machine does; two ranks share theirs equally.
    measured["seconds"] = seconds + runs[2]["seconds"] / 2
    print(f"tokenizer and training: {measured['seconds']:.0f} s of two cores")
    if options.write:
        print(f"written to {results.append('classification', measured).name}")
    sys.exit("\n".join(find_failures(measured, runs)) or 0)


if __name__ == "__main__":
    main()
