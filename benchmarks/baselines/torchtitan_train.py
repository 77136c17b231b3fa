"""torchtitan 0.3.0's trainer, brought to run on a CPU without changing what a step computes.

By default as its recipes are: bf16 parameters under FSDP, the loss in chunks, and what is not a
product recomputed; eager. `--best`: nothing recomputed, blocks and loss compiled.

Its language models attend by flex_attention or FlashAttention's varlen alone, and neither has a
gradient on CPUs (torch 2.13). The causal SDPA that it has for other models stands in.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
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
    # It calls a function that came after torch 2.13, once after the first step.
    dist.set_timeout = getattr(dist, "set_timeout", lambda *_: None)
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in alone.items()}, MASTER_PORT="0")


def model_spec(load: Workload) -> Any:
    """Return the benchmark's model, built of the parts of its Llama 3."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention

    spec = llama3.model_registry("debugmodel")
    model = spec.model
    model.dim, model.vocab_size = load.dim, load.vocab
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = load.vocab
    model.layers = llama3._build_llama3_layers(
        n_layers=load.layers,
        dim=load.dim,
        n_heads=load.heads,
        n_kv_heads=load.kv_heads,
        hidden_dim=load.ffn,
        rope=ComplexRoPE.Config(
            dim=load.dim // load.heads, max_seq_len=load.seq_len, theta=load.rope_theta
        ),
        attn_backend="flex",
    )
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def make_batches(load: Workload) -> Any:
    """Return the config of a loader that gives batches as torchtitan's own do."""
    from torchtitan.components.dataloader import BaseDataLoader

    class Batches(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            rows = rows_with_successor(load)
            self.loader = torch.utils.data.DataLoader(rows, batch_size=load.batch, drop_last=True)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            positions = torch.arange(load.seq_len).expand(load.batch, -1)
            for rows in self.loader:
                yield {"input": rows[:, :-1], "positions": positions}, rows[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    return Batches.Config()


def no_tokenizer() -> Any:
    """Return the config of a tokenizer without text."""
    from torchtitan.components.tokenizer import BaseTokenizer

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None

    return NoTokenizer.Config()


def trainer_config(load: Workload, options: Any) -> Any:
    from torchtitan.config import CompileConfig
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.dump_folder = tempfile.mkdtemp(dir=".")
    config.model_spec = model_spec(load)
    config.loss.loss_fn.global_vocab_size = load.vocab
    config.tokenizer, config.dataloader = no_tokenizer(), make_batches(load)
    (group,) = config.optimizer.param_groups
    group.optimizer_kwargs |= {"lr": load.lr, "weight_decay": load.weight_decay}
    config.lr_scheduler.warmup_steps = 1
    config.training.local_batch_size, config.training.seq_len = load.batch, load.seq_len
    config.training.max_norm, config.training.steps = load.clip_norm, load.max_steps
    config.checkpoint.enable = config.validator.enable = False
    config.metrics.log_freq = 10
    if options.fp32:
        config.training.mixed_precision_param = "float32"
    if options.best:
        config.activation_checkpoint = None
        config.compile = CompileConfig(enable=True)
    return config


def main() -> None:
    parser = baseline_arguments(__doc__)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    options = parser.parse_args()
    run_on_cpu()
    from torchtitan.tools.logging import init_logger
    from torchtitan.trainer import Trainer

    init_logger()
    turn = Turn()
    step = Trainer.train_step

    def train_step(*args: Any) -> None:
        step(*args)
        turn.step_done()

    Trainer.train_step = train_step
    trainer_config(Workload(options.vocab, options.tokens), options).build().train()


if __name__ == "__main__":
    main()
