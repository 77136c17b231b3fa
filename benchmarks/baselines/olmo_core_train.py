"""OLMo-core 3.0.0's Trainer on its Llama-like Transformer.

By default as its train module comes: fp32, eager. `--best`: bf16 autocast, compiled blocks, and the
fused AdamW.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field

from olmo_core.config import DType
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, ConstantScheduler
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment
from olmo_core.train.callbacks import Callback
from olmo_core.train.train_module import TransformerTrainModuleConfig
from turns import Turn
from workload import Workload, baseline_arguments


@dataclass
class TakeTurns(Callback):
    turn: Turn = field(default_factory=Turn)

    def post_step(self) -> None:
        self.turn.step_done()


def model_config(load: Workload) -> TransformerConfig:
    return TransformerConfig.llama_like(
        d_model=load.dim,
        vocab_size=load.vocab,
        n_layers=load.layers,
        n_heads=load.heads,
        n_kv_heads=load.kv_heads,
        layer_norm_eps=load.norm_eps,
        rope_theta=int(load.rope_theta),
        attn_backend=AttentionBackendName.torch,
        feed_forward=FeedForwardConfig(hidden_size=load.ffn, bias=False),
    )


def main() -> None:
    parser = baseline_arguments(__doc__)
    parser.add_argument("--best", action="store_true")
    options = parser.parse_args()
    load = Workload(options.vocab, options.tokens)
    folder = tempfile.mkdtemp(dir=".")
    prepare_training_environment(seed=0, backend=None)
    tokens = load.batch * load.seq_len
    train_module = TransformerTrainModuleConfig(
        rank_microbatch_size=tokens,
        max_sequence_length=load.seq_len,
        optim=AdamWConfig(
            lr=load.lr,
            betas=load.betas,
            eps=load.eps,
            weight_decay=load.weight_decay,
            fused=options.best or None,
        ),
        max_grad_norm=load.clip_norm,
        scheduler=ConstantScheduler(),
        compile_model=options.best,
        autocast_precision=DType.bfloat16 if options.best else None,
    ).build(model_config(load).build(init_device="meta"))
    # The file is a flat one, of the dtype that it derives from the size of the vocabulary.
    dataset = NumpyFSLDatasetConfig(
        paths=[str(load.tokens)],
        sequence_length=load.seq_len,
        tokenizer=TokenizerConfig(vocab_size=load.vocab, eos_token_id=1, pad_token_id=0),
        work_dir=folder,
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=tokens, seed=0).build(dataset)
    trainer = TrainerConfig(
        save_folder=folder,
        save_overwrite=True,
        max_duration=Duration.steps(load.max_steps),
        no_checkpoints=True,
        no_evals=True,
    ).with_callback("turns", TakeTurns())
    trainer.build(train_module, loader).fit()


if __name__ == "__main__":
    main()
