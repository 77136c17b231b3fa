"""Ragged rows beside rows that are padded to the longest of their batch: CPU seconds of a step.

Lengths are log-normal. Both take turns on the same samples and the same model, on one thread, and
run forward and backward from host tensors: gathering samples into blocks and scattering them back
is part of it. The ideal is the ratio of positions.

    python benchmarks/ragged.py --write
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import results
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.engine.data.batch import IGNORED, TokenBatch
from trainer.engine.tasks.encode_answers import count_answer_tokens
from trainer.engine.tasks.preference.batch import PairBatch, make_collation
from trainer.engine.tasks.preference.losses import DPO
from trainer.engine.tasks.preference.pairs import AnswerRecord, PairRecord
from trainer.kernels.choose import Kernels, choose
from trainer.kernels.ragged.lengths import SampleLengths
from trainer.model_zoo.language_model import LanguageModel
from trainer.model_zoo.llama3.config import Llama3Config

SIGMA, SAMPLES, VOCAB = 0.8, 16, 2048
PROMISED, IDEAL = 1.6, 3.3
MODELS = {
    "small": {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 192},
    "width 256": {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 768},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--median", type=int, action="append", help="default: 64 and 256 tokens")
    parser.add_argument("--step", choices=STEPS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(name, prepare_step(name, median), median, options.rounds, draw_batches)
        for median in options.median or (64, 256)
        for name, (prepare_step, draw_batches) in STEPS.items()
        if name in (options.step or STEPS)
    ]
    heads = ["step, median length", "padded ms", "ragged ms", "times as fast", "positions"]
    lines = [
        [
            f"{row['step']}, {row['median_tokens']}",
            f"{row['padded_ms']:.0f}",
            f"{row['ragged_ms']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_of_positions']:.2f}",
        ]
        for row in rows
    ]
    print(results.table(heads, lines))
    print(f"promised {PROMISED}; ideal {IDEAL}")
    if options.write:
        measured = {"sigma": SIGMA, "samples": SAMPLES, "rounds": options.rounds, "rows": rows}
        print(f"written to {results.append('ragged', measured).name}")


Step = Callable[[Any], Callable[[], None]]
"""what to run for a batch; what is made before is not timed"""
Draw = Callable[[int], dict[str, Any]]
"""the same samples padded and ragged, of a median length"""


def attention_step(_: str, median: int) -> Step:
    """Return forward and backward of attention alone: 8 heads that share 4 keys, 64 wide."""
    attention = choose({}, "cpu", 16 * median).attention

    def prepare(batch: TokenBatch) -> Callable[[], None]:
        shape, lengths = batch.tokens.shape, batch.row_lengths
        inputs = [torch.randn(*shape, heads, 64, requires_grad=True) for heads in (8, 4, 4)]
        direction = torch.randn(*shape, 8, 64)
        return lambda: attention(*inputs, lengths).backward(direction)

    return prepare


def build_model(name: str, median: int) -> tuple[LanguageModel, Kernels]:
    """Return a model of random weights, and the kernels it computes with."""
    kernels = choose({}, "cpu", 16 * median)
    model = Llama3Config(**MODELS[name], vocab_size=VOCAB).build(kernels)
    model.init_buffers(torch.device("cpu"))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return model, kernels


def preference_step(_: str, median: int) -> Step:
    """Return a step of DPO: a reference's forward pass, and forward and backward of a model."""
    (model, kernels), (reference, _) = build_model("small", median), build_model("small", median)
    task = DPO().build(kernels)

    def run(model: LanguageModel, batch: PairBatch, record: AnswerRecord) -> Tensor:
        rows = {"lengths": batch.ragged} if batch.ragged else {}
        return model(batch.tokens, labels=batch.labels, loss=record, **rows)

    def step(batch: PairBatch) -> None:
        model.zero_grad()
        batch = batch.to(torch.device("cpu"))
        with torch.no_grad():
            run(reference, batch, known := AnswerRecord(batch, kernels))
        batch = replace(batch, reference=known.log_probs)
        run(model, batch, PairRecord(batch, kernels, task.score)).backward()

    return lambda batch: lambda: step(batch)


def model_step(name: str, median: int) -> Step:
    """Return forward and backward of a model from host tensors."""
    model, kernels = build_model(name, median)

    def step(batch: TokenBatch) -> None:
        model.zero_grad()
        batch = batch.to(torch.device("cpu"))
        loss = model(
            batch.tokens,
            labels=batch.labels,
            loss=kernels.linear_cross_entropy,
            positions=batch.positions,
            lengths=batch.row_lengths,
        )
        loss.backward()

    return lambda batch: lambda: step(batch)


def measure(
    name: str, prepare: Step, median: int, rounds: int, draw_batches: Draw
) -> dict[str, Any]:
    """Return the times of both, and the ratio of their sums over all rounds."""
    torch.manual_seed(0)
    seconds: dict[str, list[float]] = {"padded": [], "ragged": []}
    positions = {"padded": 0, "ragged": 0}
    for turn in range(rounds + 1):
        batches = draw_batches(median)
        for kind in batches if turn % 2 else reversed(batches):
            step = prepare(batches[kind])
            started = time.process_time()
            step()
            if turn:  # the first one takes memory from the system
                seconds[kind].append(time.process_time() - started)
                positions[kind] += batches[kind].tokens.numel()
    return {
        "step": name,
        "median_tokens": median,
        "ratio": round(sum(seconds["padded"]) / sum(seconds["ragged"]), 2),
        "ratio_of_positions": round(positions["padded"] / positions["ragged"], 2),
        "padded_ms": round(1e3 * statistics.mean(seconds["padded"]), 1),
        "ragged_ms": round(1e3 * statistics.mean(seconds["ragged"]), 1),
    }


def draw_lengths(count: int, median: int) -> list[int]:
    """Return log-normal lengths, 1 at least."""
    return (torch.randn(count) * SIGMA).exp().mul(median).round().clamp(min=1).int().tolist()


def draw_pairs(median: int) -> dict[str, PairBatch]:
    """Return the same pairs of answers, each as long as its prompt in the median, in both ways."""
    drawn = [torch.randint(VOCAB, (n,)).numpy() for n in draw_lengths(3 * SAMPLES, median // 2)]
    thirds = zip(drawn[::3], drawn[1::3], drawn[2::3], strict=True)
    samples = [dict(zip(("prompt", "chosen", "rejected"), each, strict=True)) for each in thirds]
    batches = {}
    for kind in ("padded", "ragged"):
        collation = make_collation(0, with_mismatches=False, ragged=kind == "ragged")
        arrays = collation.collate(samples, max(map(count_answer_tokens, samples)))
        columns = {key: torch.from_numpy(array) for key, array in arrays.items()}
        batches[kind] = collation.batch_class.from_columns(columns)
    return batches


def draw(median: int) -> dict[str, TokenBatch]:
    """Return the same samples in padded rows, and in a flat row."""
    lengths = draw_lengths(SAMPLES, median)
    samples = [torch.randint(VOCAB, (length + 1,)) for length in lengths]

    def pad(columns: list[Tensor], fill: int) -> Tensor:
        return torch.stack([F.pad(x, (0, max(lengths) - len(x)), value=fill) for x in columns])

    inputs, labels = [x[:-1] for x in samples], [x[1:] for x in samples]
    positions = torch.cat([torch.arange(length) for length in lengths])
    flat = (x.unsqueeze(0) for x in (torch.cat(inputs), torch.cat(labels), positions))
    return {
        "padded": TokenBatch(pad(inputs, 0), pad(labels, IGNORED)),
        "ragged": TokenBatch(*flat, row_lengths=SampleLengths(lengths)),
    }


STEPS: dict[str, tuple[Callable[[str, int], Step], Draw]] = {
    "attention alone": (attention_step, draw),
    **dict.fromkeys(MODELS, (model_step, draw)),
    "preferences": (preference_step, draw_pairs),
}


if __name__ == "__main__":
    main()
