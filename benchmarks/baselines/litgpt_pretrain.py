"""litgpt's pretraining on Lightning Fabric.

By default as it comes on a CPU: bf16-mixed under torch.compile, which it always calls.
`--best` adds the fused AdamW that it uses on GPUs only; `--eager` is fp32 with Dynamo off.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if "--eager" in sys.argv:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

import lightning
import litgpt.pretrain
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from turns import Turn
from workload import Workload, baseline_arguments, rows_with_successor


@dataclass
class Rows(DataModule):
    load: Workload

    def connect(self, *_: Any, **__: Any) -> None:
        pass

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            rows_with_successor(self.load), batch_size=self.load.batch, drop_last=True
        )

    val_dataloader = train_dataloader


def model_config(load: Workload) -> Config:
    return Config(
        name="benchmark",
        block_size=load.seq_len,
        vocab_size=load.vocab,
        padded_vocab_size=load.vocab,
        n_layer=load.layers,
        n_head=load.heads,
        n_query_groups=load.kv_heads,
        n_embd=load.dim,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=load.norm_eps,
        mlp_class_name="LLaMAMLP",
        intermediate_size=load.ffn,
    )


def main() -> None:
    parser = baseline_arguments(__doc__)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    load = Workload(options.vocab, options.tokens)
    sys.argv = sys.argv[:1]  # litgpt parses the arguments again
    turn = Turn()
    # litgpt logs once at the end of each iteration (log_interval=1 is its default).
    lightning.Fabric.log_dict = lambda *_, **__: turn.step_done()
    adamw = {"lr": load.lr, "weight_decay": load.weight_decay, "betas": load.betas}
    if options.best:
        make = litgpt.pretrain.instantiate_torch_optimizer
        litgpt.pretrain.instantiate_torch_optimizer = lambda optimizer, weights, **_: make(
            optimizer, weights, fused=True
        )
    litgpt.pretrain.setup(
        "benchmark",
        model_config=model_config(load),
        out_dir=Path(tempfile.mkdtemp(dir=".")),
        precision="32-true" if options.eager else None,
        data=Rows(load),
        train=TrainArgs(
            save_interval=None,
            log_interval=1,
            global_batch_size=load.batch,
            micro_batch_size=load.batch,
            max_tokens=load.max_steps * load.batch * load.seq_len,
            max_norm=load.clip_norm,
            min_lr=load.lr,
            lr_warmup_steps=1,
            max_seq_length=load.seq_len,
        ),
        eval=EvalArgs(interval=10**9, max_iters=1, final_validation=False),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": adamw},
        devices=1,
        logger_name="csv",
    )


if __name__ == "__main__":
    main()
