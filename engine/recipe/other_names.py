"""What keys, components, options and commands of other trainers are called here.

The names are those of torchtitan, Hugging Face's Trainer and configs, TRL, axolotl, litgpt, nanoGPT
and Megatron-LM. They are compared without regard to case, and "-" is "_".
"""

from __future__ import annotations

from collections.abc import Mapping

BATCH = (
    "data.global_batch (sequences of an optimizer step, over all ranks) or data.micro_batch (those "
    "that a rank computes at once)"
)
ACCUMULATION = "data.global_batch: micro batches are accumulated until it is full"
PRECISION = 'precision.compute = "bf16", "fp16" or "fp32"'
SOURCES = "[[data.sources]]"
TRACKERS = "[[metrics.trackers]]"
EPOCHS_OF_SAVES = "checkpoint.interval, or checkpoint.interval_epochs"

KEYS = {
    # how long, where, from what
    "max_iters": "run.steps",
    "max_steps": "run.steps",
    "num_steps": "run.steps",
    "train_iters": "run.steps",
    "total_steps": "run.steps",
    "steps": "run.steps",
    "epochs": "run.epochs",
    "seed": "run.seed",
    "num_train_epochs": "run.epochs",
    "num_epochs": "run.epochs",
    "max_epochs": "run.epochs",
    "output_dir": "run.dir",
    "out_dir": "run.dir",
    "dump_folder": "run.dir",
    "save_dir": "run.dir",
    "run_name": "run.name",
    "experiment_name": "run.experiment",
    "random_seed": "run.seed",
    "gc_freq": "run.gc_interval",
    "resume_from_checkpoint": "run.resume",
    "load_step": "run.resume",
    "auto_resume_from_checkpoints": 'run.resume = "auto", the default',
    "base_model": "run.init_from",
    "model_name_or_path": "run.init_from",
    "pretrained_model_name_or_path": "run.init_from",
    "checkpoint_dir": "run.init_from",
    "initial_checkpoint_dir": "run.init_from",
    "initial_load_path": "run.init_from",
    "init_from_checkpoint": "run.init_from",
    # model
    "model_type": "model.name",
    "architectures": "model.name",
    "hidden_size": "model.dim",
    "n_embd": "model.dim",
    "d_model": "model.dim",
    "num_hidden_layers": "model.n_layers",
    "num_layers": "model.n_layers",
    "n_layer": "model.n_layers",
    "num_attention_heads": "model.n_heads",
    "n_head": "model.n_heads",
    "num_key_value_heads": "model.n_kv_heads",
    "num_query_groups": "model.n_kv_heads",
    "n_query_groups": "model.n_kv_heads",
    "intermediate_size": "model.ffn_dim",
    "ffn_hidden_size": "model.ffn_dim",
    "hidden_dim": "model.ffn_dim",
    "rope_base": "model.rope_theta",
    "rotary_base": "model.rope_theta",
    "rms_norm_eps": "model.norm_eps",
    "layer_norm_eps": "model.norm_eps",
    "layernorm_epsilon": "model.norm_eps",
    "initializer_range": "model.init_std",
    "tie_word_embeddings": "model.tie_embeddings",
    "tie_weights": "model.tie_embeddings",
    "sliding_window": "model.window",
    "padded_vocab_size": "model.vocab_size",
    "attn_implementation": "kernels.attention",
    "flash_attention": "kernels.attention, which is chosen by itself",
    "num_local_experts": "model.moe.num_experts",
    "n_routed_experts": "model.moe.num_experts",
    "num_experts_per_tok": "model.moe.experts_per_token",
    "moe_router_topk": "model.moe.experts_per_token",
    "top_k": "model.moe.experts_per_token",
    "moe_intermediate_size": "model.moe.expert_ffn_dim",
    "moe_ffn_hidden_size": "model.moe.expert_ffn_dim",
    "n_shared_experts": "model.moe.num_shared",
    "num_shared_experts": "model.moe.num_shared",
    "router_aux_loss_coef": "model.moe.aux_weight",
    "moe_aux_loss_coeff": "model.moe.aux_weight",
    "load_balance_coeff": "model.moe.bias_rate",
    "capacity": "model.moe.capacity_factor",
    # data
    "batch_size": BATCH,
    "train_batch_size": BATCH,
    "global_batch_size": "data.global_batch",
    "micro_batch_size": "data.micro_batch",
    "local_batch_size": "data.micro_batch",
    "per_device_train_batch_size": "data.micro_batch",
    "per_device_eval_batch_size": "evaluate.splits.micro_batch",
    "gradient_accumulation_steps": ACCUMULATION,
    "grad_accum_steps": ACCUMULATION,
    "accumulate_grad_batches": ACCUMULATION,
    "seq_len": "data.seq_len",
    "block_size": "data.seq_len",
    "context_length": "data.seq_len",
    "seq_length": "data.seq_len",
    "sequence_len": "data.seq_len",
    "sequence_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "max_length": "data.seq_len",
    "max_position_embeddings": "model.max_seq_len",
    "sample_packing": "data.packing",
    "dataset": SOURCES,
    "datasets": SOURCES,
    "dataset_path": SOURCES,
    "dataset_name": SOURCES,
    "data_path": SOURCES,
    "train_file": SOURCES,
    "train_data": SOURCES,
    "dataset_text_field": "field, in [[data.sources]]",
    "dataloader_num_workers": "data.workers",
    "num_workers": "data.workers",
    "val_set_size": "data.validation_fraction",
    "dataset_prepared_path": "data.cache_dir",
    "tokenizer_path": "tokenizer.path",
    "tokenizer_dir": "tokenizer.path",
    "tokenizer_name": "tokenizer.path",
    "hf_assets_path": "tokenizer.path",
    "tokenizer_type": "tokenizer.name",
    # optimizer and schedule
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "adam_eps": "optimizer.eps",
    "wd": "optimizer.weight_decay",
    "grad_clip": "optimizer.clip_norm",
    "clip_grad": "optimizer.clip_norm",
    "gradient_clip_val": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "max_norm": "optimizer.clip_norm",
    "optim": "optimizer.name",
    "early_step_in_backward": "memory.optimizer_in_backward",
    "warmup_iters": "schedule.warmup_steps",
    "lr_warmup_steps": "schedule.warmup_steps",
    "lr_warmup_iters": "schedule.warmup_steps",
    "num_warmup_steps": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_steps, a number of steps",
    "min_lr": "schedule.min_lr_ratio, relative to optimizer.lr",
    "min_lr_factor": "schedule.min_lr_ratio",
    "decay_ratio": "schedule.decay_fraction",
    "decay_type": "schedule.decay",
    "lr_decay_style": "schedule.name",
    "lr_scheduler": "schedule.name",
    "lr_scheduler_type": "schedule.name",
    "label_smoothing_factor": "loss.label_smoothing",
    # plans
    "tensor_parallel_degree": "parallel.tensor",
    "tensor_parallel_size": "parallel.tensor",
    "tensor_model_parallel_size": "parallel.tensor",
    "tp_size": "parallel.tensor",
    "tp": "parallel.tensor",
    "pipeline_parallel_degree": "parallel.pipeline",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "pp_size": "parallel.pipeline",
    "pp": "parallel.pipeline",
    "context_parallel_degree": "parallel.context",
    "context_parallel_size": "parallel.context",
    "cp_size": "parallel.context",
    "cp": "parallel.context",
    "expert_parallel_degree": "parallel.expert",
    "expert_model_parallel_size": "parallel.expert",
    "ep_size": "parallel.expert",
    "ep": "parallel.expert",
    "expert_tensor_parallel_degree": "parallel.expert_tensor",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "data_parallel_replicate_degree": "parallel.replicate",
    "dp_replicate_size": "parallel.replicate",
    "data_parallel_shard_degree": "parallel.shard",
    "dp_shard_size": "parallel.shard",
    "context_parallel_rotate_method": "parallel.context_exchange",
    "enable_async_tensor_parallel": "parallel.async_tensor",
    "pipeline_parallel_schedule": "parallel.pipelining.schedule",
    "num_microbatches": "parallel.pipelining.micro_batches",
    "fsdp_reshard_after_forward": "parallel.fsdp.strategy",
    "fsdp_sharding_strategy": "parallel.fsdp.strategy",
    "fsdp_config": "parallel.fsdp",
    "deepspeed": "parallel.fsdp: full_shard is ZeRO-3, shard_grad_op is ZeRO-2",
    "enable_cpu_offload": "parallel.fsdp.offload",
    "cpu_offload": "parallel.fsdp.offload",
    # precision, memory, speed
    "bf16": PRECISION,
    "fp16": PRECISION,
    "dtype": PRECISION,
    "torch_dtype": PRECISION,
    "mixed_precision_param": "precision.compute",
    "mixed_precision_reduce": "precision.reduce",
    "gradient_checkpointing": "memory.recompute",
    "activation_checkpointing": "memory.recompute",
    "activation_checkpoint.mode": "memory.recompute",
    "recompute_granularity": "memory.recompute",
    "torch_compile": "compile.enabled",
    "training.compile": "compile.enabled",
    "compile.enable": "compile.enabled",
    # checkpoints, validation, metrics
    "save_steps": "checkpoint.interval",
    "save_interval": "checkpoint.interval",
    "save_every": "checkpoint.interval",
    "saves_per_epoch": EPOCHS_OF_SAVES,
    "save_strategy": EPOCHS_OF_SAVES,
    "save_total_limit": "checkpoint.keep",
    "keep_latest_k": "checkpoint.keep",
    "async_mode": "checkpoint.mode",
    "last_save_model_only": 'checkpoint.last = "weights"',
    "load_best_model_at_end": "checkpoint.keep_best",
    "eval_interval": "evaluate.interval",
    "eval_steps": "evaluate.interval",
    "eval_every": "evaluate.interval",
    "evals_per_epoch": "evaluate.interval_epochs",
    "eval_strategy": "evaluate.interval, or evaluate.interval_epochs",
    "evaluation_strategy": "evaluate.interval, or evaluate.interval_epochs",
    "validation.freq": "evaluate.interval",
    "validation.steps": "evaluate.steps",
    "eval_iters": "evaluate.steps",
    "max_eval_samples": "evaluate.steps",
    "metric_for_best_model": "evaluate.metric",
    "greater_is_better": "evaluate.direction",
    "early_stopping_patience": "evaluate.patience",
    "logging_steps": "metrics.interval",
    "log_interval": "metrics.interval",
    "log_freq": "metrics.interval",
    "log_every": "metrics.interval",
    "enable_tensorboard": "metrics.tensorboard",
    "enable_wandb": TRACKERS,
    "report_to": TRACKERS,
    "wandb_log": TRACKERS,
    "wandb_project": TRACKERS,
    "use_wandb": TRACKERS,
    "mlflow_experiment_name": TRACKERS,
    "enable_profiling": "profile.steps",
    "profile_freq": "profile.steps",
    # adapters, averages
    "lora_r": "lora.rank",
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.targets",
    "target_modules": "lora.targets",
    "adapter": "[lora]",
    "peft_config": "[lora]",
    "ema_decay": "ema.decay",
}
"""A name, also with the table that holds it, and the key or keys here."""

COMPONENTS: dict[str, dict[str, str]] = {
    "model": {
        "llama": "llama3 (also for Llama 1 and 2) or llama4",
        "llama2": "llama3",
        "llama3.1": "llama3",
        "llama3.2": "llama3",
        "qwen": "qwen2 (also for Qwen 2.5) or qwen3",
        "qwen2.5": "qwen2",
        "qwen2_5": "qwen2",
        "qwen3_moe": "qwen3",
        "deepseek": "deepseek_v3",
        "deepseek_v2": "deepseek_v3",
        "deepseekv3": "deepseek_v3",
        "gptoss": "gpt_oss",
        "phi": "phi3 (also for Phi-4)",
        "phi4": "phi3",
        "olmo": "olmo2",
    },
    "optimizer": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "fusedadam": "adamw",
        "fused_adam": "adamw",
    },
    "schedule": {
        "cosine_with_warmup": "cosine",
        "linear_with_warmup": "linear",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
        "inverse_square_root": "inverse_sqrt",
    },
    "tokenizer": {
        "huggingface": "hf",
        "auto": "hf",
        "tokenizers": "hf",
        "sentencepiece": "hf",
        "byte": "bytes",
    },
    "source": {"json": "jsonl", "huggingface": "hf", "hub": "hf", "txt": "text", "bin": "tokens"},
    "loss": {"ce": "cross_entropy", "crossentropyloss": "cross_entropy"},
    "task": {
        "pretraining": "language_modeling",
        "causal_lm": "language_modeling",
        "clm": "language_modeling",
        "sft": "language_modeling, with a source of kind chat",
        "mlm": "masked_language_modeling",
        "dpo": "preference",
        "classification": "sequence_classification or token_classification",
    },
    "tracker": {"weights_and_biases": "wandb", "tb": "tensorboard"},
}
"""For each kind, a name elsewhere and the name here."""

OPTIONS = {
    "--config": "the recipe is an argument: trainer run RECIPE",
    "--config_file": "the recipe is an argument: trainer run RECIPE",
    "--job.config_file": "the recipe is an argument: trainer run RECIPE",
    "--resume": "a run resumes from its newest checkpoint when the same command runs again; see "
    "`trainer docs run.resume`",
    "--nproc_per_node": "--nproc",
    "--nproc-per-node": "--nproc",
    "--num_processes": "--nproc",
    "--devices": "--nproc",
    "--gpus": "--nproc",
    "--ngpu": "--nproc",
}
COMMANDS = {
    "train": "run",
    "pretrain": "run",
    "finetune": "run",
    "launch_run": "run",
    "check": "validate",
    "init": "new",
    "config": "explain",
    "convert": "convert-ckpt",
    "eval": "evaluate",
    "inference": "infer",
    "chat": "generate",
    "preprocess": "data prepare",
    "tokenize": "data prepare",
    "estimate": "estimate-memory",
    "env": "doctor",
    "help": "--help",
}


def find_key(*path: str) -> str:
    """Return what to write for the key of another trainer; empty: the name is not known.

    Args:
        path: the names of the tables around the key, and its own.
    """
    *tables, key = map(_normalize, path)
    around = KEYS.get(f"{tables[-1]}.{key}", "") if tables else ""
    return around or KEYS.get(key, "")


def find_keys(table: str, values: Mapping[str, object]) -> str:
    """Return what to write for the keys of another trainer's table; empty: it has none."""
    found = {key: find_key(table, key) for key in values}
    return "; ".join(f"{key}: write {ours}" for key, ours in found.items() if ours)


def find_component(kind: str, name: str) -> str:
    """Return what a component of another trainer is called here; empty: the name is not known."""
    return COMPONENTS.get(kind, {}).get(_normalize(name), "")


def find_option(option: str) -> str:
    """Return what to write for an option of another trainer; empty: it is not known."""
    if text := OPTIONS.get(option):
        return text
    key = find_key(*option.lstrip("-").split("."))
    return f"a key of the recipe: {key}; --set KEY=VALUE changes one" if key else ""


def _normalize(name: str) -> str:
    return name.lower().replace("-", "_")
