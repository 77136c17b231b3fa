"""torchtitan 0.2.2's trainer, brought to run on a CPU without changing what a step computes.

By default as it comes on one device: bf16 autocast, every second block recomputed, eager.
`--best`: nothing recomputed, blocks and loss compiled.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from turns import Turn
from workload import Workload, baseline_arguments, rows_with_successor


def run_on_cpu() -> None:
    """Give torch.cpu what torchtitan asks of a device; call before importing torchtitan."""
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda _=None: "CPU"
    cpu.get_device_properties = lambda _=None: SimpleNamespace(total_memory=2**34)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda _=None: None
    cpu.memory_stats = lambda _=None: {}
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: cpu
    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in alone.items()}, MASTER_PORT="0")


class Batches:
    """Batches as torchtitan's own loaders give them."""

    def __init__(self, load: Workload) -> None:
        rows = rows_with_successor(load)
        self.loader = torch.utils.data.DataLoader(rows, batch_size=load.batch, drop_last=True)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for rows in self.loader:
            yield {"input": rows[:, :-1]}, rows[:, 1:]


def register(load: Workload) -> None:
    from torchtitan.models import llama3
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.protocols import train_spec

    spec = llama3.get_train_spec()
    # Its rule gives 2 / 3 * 4 * 256 = 682, rounded up to 768.
    sizes = TransformerModelArgs(
        dim=load.dim,
        n_layers=load.layers,
        n_heads=load.heads,
        n_kv_heads=load.kv_heads,
        vocab_size=load.vocab,
        multiple_of=load.ffn // 3,
        norm_eps=load.norm_eps,
        rope_theta=load.rope_theta,
    )
    spec.model_args = {"benchmark": sizes}
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = lambda **_: Batches(load)
    train_spec.register_train_spec("benchmark", spec)


def main() -> None:
    parser = baseline_arguments(__doc__)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    options = parser.parse_args()
    load = Workload(options.vocab, options.tokens)
    settings = {
        "job.dump_folder": tempfile.mkdtemp(dir="."),
        "model.name": "benchmark",
        "model.flavor": "benchmark",
        "optimizer.lr": load.lr,
        "optimizer.weight_decay": load.weight_decay,
        "lr_scheduler.warmup_steps": 1,
        "training.local_batch_size": load.batch,
        "training.seq_len": load.seq_len,
        "training.max_norm": load.clip_norm,
        "training.steps": load.max_steps,
    }
    if options.fp32:
        settings["training.mixed_precision_param"] = "float32"
    if options.best:
        settings["activation_checkpoint.mode"] = "none"
    sys.argv = [sys.argv[0], *(f"--{name}={value}" for name, value in settings.items())]
    sys.argv += ["--compile.enable"] * options.best
    run_on_cpu()
    register(load)
    from torchtitan import train  # binds sys.argv when it is imported

    turn = Turn()
    step = train.Trainer.train_step

    def train_step(*args: Any) -> None:
        step(*args)
        turn.step_done()

    train.Trainer.train_step = train_step
    train.main(train.Trainer)


if __name__ == "__main__":
    main()
