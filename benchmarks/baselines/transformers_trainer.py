"""Hugging Face's Trainer on its LlamaForCausalLM.

By default as it comes: fp32, eager. `--best`: bf16 and torch.compile.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from turns import Turn
from workload import Workload, baseline_arguments, rows_with_successor


class TakeTurns(TrainerCallback):
    def __init__(self) -> None:
        self.turn = Turn()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.turn.step_done()


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    # The labels are shifted inside the model, so the last token of a row predicts nothing.
    tokens = torch.stack(rows)[:, :-1]
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = baseline_arguments(__doc__)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--attention", default="sdpa")
    options = parser.parse_args()
    load = Workload(options.vocab, options.tokens)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=load.vocab,
            hidden_size=load.dim,
            num_hidden_layers=load.layers,
            num_attention_heads=load.heads,
            num_key_value_heads=load.kv_heads,
            intermediate_size=load.ffn,
            max_position_embeddings=load.seq_len,
            rms_norm_eps=load.norm_eps,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation=options.attention,
        )
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir="."),
        per_device_train_batch_size=load.batch,
        max_steps=load.max_steps,
        learning_rate=load.lr,
        weight_decay=load.weight_decay,
        adam_beta1=load.betas[0],
        adam_beta2=load.betas[1],
        max_grad_norm=load.clip_norm,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=options.best,
        torch_compile=options.best,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=rows_with_successor(load),
        data_collator=collate,
        callbacks=[TakeTurns()],
    ).train()


if __name__ == "__main__":
    main()
