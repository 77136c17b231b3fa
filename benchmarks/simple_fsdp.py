"""FSDP2 around compiled blocks beside SimpleFSDP in one graph, on two ranks with gloo.

SimpleFSDP (Zhang et al. 2024, arXiv:2411.00284) writes the all-gather of each weight into the
forward pass, so that torch.compile sees a whole model with its collectives. Here a weight's local
view does so. A step is forward, backward and SGD on this rank's shards; CPU seconds are rank 0's.

    python benchmarks/simple_fsdp.py --layers 6
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed as dist
from baselines.turns import Baseline, Turn, take_turns
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from trainer.engine.parallel.blocks import open_compiler, transform_blocks
from trainer.engine.parallel.collectives import all_gather_no_grad, reduce_scatter_no_grad
from trainer.engine.parallel.fsdp import apply_fsdp
from trainer.engine.parallel.materialize import materialize, without_storage
from trainer.engine.parallel.tables import Compile, Memory, Parallel
from trainer.kernels.choose import choose
from trainer.model_zoo.layers.dense import LocalParameters
from trainer.model_zoo.llama3.config import Llama3Config

RANKS, ROWS, SEQ_LEN, VOCABULARY, RATE = 2, 4, 256, 2048, 1e-3
CPU = torch.device("cpu")
BUCKETS = {
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
}
OVERLAP = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.compute_estimator": "analytical",
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "FSDP2, compiled blocks": ("fsdp2", {}),
    "SimpleFSDP, compiled blocks": ("blocks", {}),
    "SimpleFSDP, one graph": ("graph", {}),
    "SimpleFSDP, one graph, buckets": ("graph", BUCKETS),
    "SimpleFSDP, one graph, overlap": ("graph", OVERLAP),
}
"""name -> how the model is split and compiled, and inductor's options"""


class _GatherWeight(torch.autograd.Function):
    """All-gathers a weight in bf16; the backward pass averages its gradient in fp32."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_no_grad(shard.bfloat16(), 0, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_no_grad(grad.float(), 0, ctx.group) / ctx.group.size(), None


def gather(shard: Tensor, group: ProcessGroup) -> Tensor:
    """Return a weight, which the backward pass gathers again (reshard after forward)."""
    gathered: Tensor = checkpoint(_GatherWeight.apply, shard, group, use_reentrant=False)
    return gathered


def shard_weights(model: nn.Module, group: ProcessGroup) -> None:
    """Keep this rank's rows of every weight, and let layers gather what they compute with."""
    for module in model.modules():
        if isinstance(module, LocalParameters):
            for name, weight in list(module.named_parameters(recurse=False)):
                rows = weight.detach().chunk(RANKS)[dist.get_rank()].clone()
                setattr(module, name, nn.Parameter(rows))
                module.local_views[name] = partial(gather, group=group)


def build(kind: str, layers: int, options: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function from tokens and labels [B, S] to a loss, and its model as attribute."""
    kernels = choose({}, "cpu", SEQ_LEN, compiling=True)
    config = Llama3Config(
        dim=256, n_layers=layers, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=VOCABULARY
    )
    # Dynamo (torch 2.13) cannot trace Pydantic's private attributes, which the property reads.
    Llama3Config.is_tied = property(lambda _: False)  # type: ignore[assignment, method-assign]
    with without_storage():
        model = config.build(kernels)
    model.compute_dtype = torch.bfloat16
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replicate", "shard"))
    compiled = Compile(enabled=True, cache_dir=os.environ["TORCHINDUCTOR_CACHE_DIR"])
    compiler = open_compiler(compiled, Memory(), compiles_loss=True)
    if kind != "graph":
        transform_blocks(model, config.layout, Memory(), compiler)
    if kind == "fsdp2":
        table = Parallel(shard=RANKS)
        apply_fsdp(model, config.layout, table, mesh, CPU, torch.bfloat16, torch.float32)
    materialize(model, CPU, seed=0)
    if kind != "fsdp2":
        shard_weights(model, mesh["shard"].get_group())

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = model(tokens, labels=labels, loss=kernels.linear_cross_entropy)
        return total

    run = torch.compile(loss, fullgraph=True, options=options) if kind == "graph" else loss
    run.model = model  # type: ignore[attr-defined]
    return run


def train(kind: str, layers: int, options: dict[str, Any], notes: Path) -> None:
    """Train until the coordinator grants no more steps; write down what the first steps did."""
    torch.set_num_threads(1)
    run = build(kind, layers, options)
    weights = list(run.model.parameters())  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (ROWS, SEQ_LEN + 1), generator=generator)

    def step() -> float:
        loss = run(tokens[:, :-1], tokens[:, 1:]) / (ROWS * SEQ_LEN)
        loss.backward()
        for weight in weights:
            parts = [getattr(x, "_local_tensor", x) for x in (weight.data, weight.grad)]
            parts[0].add_(parts[1], alpha=-RATE)
            weight.grad = None
        return loss.item()

    before = cpu_seconds()
    losses = [step()]
    first = cpu_seconds() - before
    if dist.get_backend() == "fake":
        notes.write_text(json.dumps({"first": first}))
        return
    turn = Turn() if dist.get_rank() == 0 else None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        losses.append(step())
    trace.export_chrome_trace(str(notes.with_suffix(".trace")))
    losses += [step() for _ in range(8)]
    content = {"first": first, "losses": losses, "collectives": count(notes)}
    if turn is None:
        while True:
            step()
    notes.write_text(json.dumps(content))
    while True:
        turn.step_done()
        step()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the compilers that it waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def count(notes: Path) -> dict[str, list[float]]:
    """Return the number of all-gathers and reduce-scatters in a step, and MiB of this rank's shard.

    Weights are gathered in bf16, and gradients are reduced in fp32.
    """
    found = {"all-gather": [0, 0.0], "reduce-scatter": [0, 0.0]}
    for event in json.loads(notes.with_suffix(".trace").read_text())["traceEvents"]:
        words = {"c10d::allgather": ("all-gather", 2), "c10d::_allgather": ("all-gather", 2)}
        words |= {f"c10d::{_}reduce_scatter": ("reduce-scatter", 4) for _ in ("", "_")}
        for start, (name, size) in words.items():
            if event.get("name", "").startswith(start):
                # An argument is a tensor or a list of tensors; the shard is the smaller one.
                numbers = [elements(shape) for shape in event["args"]["Input Dims"]]
                found[name][0] += 1
                found[name][1] += size * min(filter(None, numbers), default=0) / 2**20
    return found


def elements(shape: list[Any]) -> int:
    """Return how many elements a tensor or a list of tensors has; 0: it is neither."""
    if shape and isinstance(shape[0], list):
        return sum(map(elements, shape))
    return torch.Size(shape).numel() if shape else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: all")
    parser.add_argument("--backend", choices=("gloo", "fake"), default="gloo")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.variant or list(VARIANTS)
    if options.rank is not None:
        kind, settings = VARIANTS[names[0]]
        store = dist.FileStore(str(Path.cwd() / "store"), RANKS)
        if options.rank == 0 and options.backend == "gloo":
            subprocess.Popen([sys.executable, "-P", *sys.argv[:-1], "1"])
        arguments = {"store": store} if options.backend == "gloo" else {}
        rank = options.rank
        dist.init_process_group(options.backend, rank=rank, world_size=RANKS, **arguments)
        train(kind, options.layers, settings, Path.cwd() / f"notes-{rank}.json")
        return
    with tempfile.TemporaryDirectory() as temporary:
        measure(names, options.layers, options.rounds, options.backend, Path(temporary))


def measure(names: list[str], layers: int, rounds: int, backend: str, folder: Path) -> None:
    """Compile each variant, start it from the cache, let all take turns, and print a table.

    Args:
        names: of the variants.
        layers: how many blocks the model has.
        rounds: how many steps are compared.
        backend: of the ranks; "fake" compiles alone.
        folder: where caches and logs go.
    """
    started: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    baselines = []
    for number, name in enumerate(names):
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache-{number}"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        # One process compiles, with ranks that answer nothing; two ranks then find the cache.
        for kind in ("fake", backend):
            place = folder / f"{number}-{kind}-{len(started[name])}"
            place.mkdir()
            words = ["--layers", str(layers), "--variant", name, "--backend", kind, "--rank", "0"]
            command = [sys.executable, "-P", str(Path(__file__).resolve()), *words]
            if kind == "fake":
                subprocess.run(command, env=environment, cwd=place, check=True)
            else:
                baselines.append(Baseline(name, command, place / "log"))
                baselines[-1].start(environment)
            started[name].append(json.loads((place / "notes-0.json").read_text()))
    if not baselines:
        rows = [[name, *(f"{each['first']:.1f}" for each in started[name])] for name in names]
        print(results.table(["CPU s of the first step", "compiled", "cached"], rows))
        return
    take_turns(baselines, warmup=3, rounds=rounds)
    rows = []
    for baseline in baselines:
        first, second = started[baseline.name]
        pairs = zip(baseline.cpu, baselines[0].cpu, strict=True)
        ratio = statistics.median(own / other for own, other in pairs)
        median = statistics.median(baseline.cpu)
        peak = f"{baseline.peak_bytes / 2**20:,.0f}"
        found = second["collectives"].items()
        collectives = ", ".join(f"{name} {calls:.0f} ({size:.1f})" for name, (calls, size) in found)
        seconds = [f"{each['first']:.1f}" for each in (first, second)]
        loss = f"{second['losses'][-1]:.4f}"
        rows.append(
            [baseline.name, f"{median:.3f}", f"{ratio:.2f}", *seconds, peak, loss, collectives]
        )
        baseline.stop()
    heads = ["", "CPU s", "ratio", "first", "cached", "peak MiB", "loss", "collectives (MiB)"]
    print(results.table(heads, rows))


if __name__ == "__main__":
    main()
