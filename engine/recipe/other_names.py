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

NAMES = {
    # how long, where, from what
    "run.steps": "max_iters max_steps num_steps train_iters total_steps steps",
    "run.epochs": "epochs num_train_epochs num_epochs max_epochs",
    "run.seed": "seed random_seed",
    "run.dir": "output_dir out_dir dump_folder save_dir",
    "run.name": "run_name",
    "run.experiment": "experiment_name",
    "run.gc_interval": "gc_freq",
    "run.resume": "resume_from_checkpoint load_step",
    'run.resume = "auto", the default': "auto_resume_from_checkpoints",
    "run.init_from": (
        "base_model model_name_or_path pretrained_model_name_or_path checkpoint_dir "
        "initial_checkpoint_dir initial_load_path init_from_checkpoint"
    ),
    # model
    "model.name": "model_type architectures",
    "model.dim": "hidden_size n_embd d_model",
    "model.n_layers": "num_hidden_layers num_layers n_layer",
    "model.n_heads": "num_attention_heads n_head",
    "model.n_kv_heads": "num_key_value_heads num_query_groups n_query_groups",
    "model.ffn_dim": "intermediate_size ffn_hidden_size hidden_dim",
    "model.rope_theta": "rope_base rotary_base",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layernorm_epsilon",
    "model.init_std": "initializer_range",
    "model.tie_embeddings": "tie_word_embeddings tie_weights",
    "model.window": "sliding_window",
    "model.vocab_size": "padded_vocab_size",
    "kernels.attention": "attn_implementation",
    "kernels.attention, which is chosen by itself": "flash_attention",
    "model.moe.num_experts": "num_local_experts n_routed_experts",
    "model.moe.experts_per_token": "num_experts_per_tok moe_router_topk top_k",
    "model.moe.expert_ffn_dim": "moe_intermediate_size moe_ffn_hidden_size",
    "model.moe.num_shared": "n_shared_experts num_shared_experts",
    "model.moe.aux_weight": "router_aux_loss_coef moe_aux_loss_coeff",
    "model.moe.bias_rate": "load_balance_coeff",
    "model.moe.capacity_factor": "capacity",
    # data
    BATCH: "batch_size train_batch_size batch_size_training",
    "data.global_batch": "global_batch_size",
    "data.micro_batch": "micro_batch_size local_batch_size per_device_train_batch_size",
    "evaluate.splits.micro_batch": "per_device_eval_batch_size",
    ACCUMULATION: "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches "
    "gradient_accumulation",
    "data.seq_len": (
        "seq_len block_size context_length seq_length sequence_len sequence_length "
        "max_seq_length max_length"
    ),
    "model.max_seq_len": "max_position_embeddings",
    "data.packing": "sample_packing",
    SOURCES: "dataset datasets dataset_path dataset_name data_path train_file train_data",
    "field, in [[data.sources]]": "dataset_text_field",
    "data.workers": "dataloader_num_workers num_workers",
    "data.validation_fraction": "val_set_size",
    "data.cache_dir": "dataset_prepared_path",
    "tokenizer.path": "tokenizer_path tokenizer_dir tokenizer_name hf_assets_path",
    "tokenizer.name": "tokenizer_type",
    # optimizer and schedule
    "optimizer.lr": "lr learning_rate max_lr",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_value": "clip_grad_value gradient_clip_value max_grad_value",
    "optimizer.clip_norm": "grad_clip clip_grad gradient_clip_val max_grad_norm max_norm",
    "optimizer.name": "optim",
    "memory.optimizer_in_backward": "early_step_in_backward",
    "schedule.warmup_steps": "warmup_iters lr_warmup_steps lr_warmup_iters num_warmup_steps",
    "schedule.warmup_steps, a number of steps": "warmup_ratio",
    "schedule.min_lr_ratio, relative to optimizer.lr": "min_lr",
    "schedule.min_lr_ratio": "min_lr_factor",
    "schedule.decay_fraction": "decay_ratio",
    "schedule.decay": "decay_type",
    "schedule.name": "lr_decay_style lr_scheduler lr_scheduler_type",
    "loss.label_smoothing": "label_smoothing_factor",
    # plans
    "parallel.tensor": (
        "tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size tp_size tp"
    ),
    "parallel.pipeline": "pipeline_parallel_degree pipeline_model_parallel_size pp_size pp",
    "parallel.context": "context_parallel_degree context_parallel_size cp_size cp",
    "parallel.expert": "expert_parallel_degree expert_model_parallel_size ep_size ep",
    "parallel.expert_tensor": "expert_tensor_parallel_degree expert_tensor_parallel_size",
    "parallel.replicate": "data_parallel_replicate_degree dp_replicate_size",
    "parallel.shard": "data_parallel_shard_degree dp_shard_size",
    "parallel.context_exchange": "context_parallel_rotate_method",
    "parallel.async_tensor": "enable_async_tensor_parallel",
    "parallel.pipelining.schedule": "pipeline_parallel_schedule",
    "parallel.pipelining.micro_batches": "num_microbatches",
    "parallel.fsdp.strategy": "fsdp_reshard_after_forward fsdp_sharding_strategy",
    "parallel.fsdp": "fsdp_config",
    "parallel.fsdp: full_shard is ZeRO-3, shard_grad_op is ZeRO-2": "deepspeed",
    "parallel.fsdp.offload": "enable_cpu_offload cpu_offload",
    # precision, memory, speed
    PRECISION: "bf16 fp16 dtype torch_dtype",
    "precision.compute": "mixed_precision_param",
    "precision.reduce": "mixed_precision_reduce",
    "memory.recompute": (
        "gradient_checkpointing activation_checkpointing activation_checkpoint.mode "
        "recompute_granularity"
    ),
    "compile.enabled": "torch_compile training.compile compile.enable",
    # checkpoints, validation, metrics
    "checkpoint.interval": "save_steps save_interval save_every",
    EPOCHS_OF_SAVES: "saves_per_epoch save_strategy",
    "checkpoint.keep": "save_total_limit keep_latest_k",
    "checkpoint.mode": "async_mode",
    'checkpoint.last = "weights"': "last_save_model_only",
    "checkpoint.keep_best": "load_best_model_at_end",
    "evaluate.interval": "eval_interval eval_steps eval_every validation.freq",
    "evaluate.interval_epochs": "evals_per_epoch",
    "evaluate.interval, or evaluate.interval_epochs": "eval_strategy evaluation_strategy",
    "evaluate.steps": "validation.steps eval_iters max_eval_samples",
    "evaluate.metric": "metric_for_best_model",
    "evaluate.direction": "greater_is_better",
    "evaluate.patience": "early_stopping_patience",
    "metrics.interval": "logging_steps log_interval log_freq log_every",
    "metrics.tensorboard": "enable_tensorboard",
    TRACKERS: "enable_wandb report_to wandb_log wandb_project use_wandb mlflow_experiment_name",
    "profile.steps": "enable_profiling profile_freq",
    # adapters, averages
    "lora.rank": "lora_r r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.rslora": "use_rslora peft_use_rslora",
    "lora.dora": "use_dora peft_use_dora",
    "lora.targets": "lora_target_modules target_modules",
    "[lora]": "adapter peft_config",
    "ema.decay": "ema_decay",
}
"""What to write, and the names of other trainers for it, some with the table that holds them."""
KEYS = {name: ours for ours, names in NAMES.items() for name in names.split()}

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
        "gpt2": "llama3 (GPT-2 itself is not there)",
        "gpt": "llama3 (GPT-2 itself is not there)",
        "nanogpt": "llama3 (GPT-2 itself is not there)",
        "gemma": "gemma2 or gemma3 (Gemma 1 is not there)",
        "gemma3_text": "gemma3",
        "gemma3text": "gemma3",
        "phi": "phi3 (also for Phi-4)",
        "phi4": "phi3",
        "olmo": "olmo2",
    },
    "optimizer": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_bnb_8bit": "adamw (8-bit states are not there)",
        "paged_adamw_8bit": "adamw (8-bit states are not there)",
        "adamw_8bit": "adamw (8-bit states are not there)",
        "fusedadam": "adamw",
        "fused_adam": "adamw",
    },
    "schedule": {
        "cosine_with_warmup": "cosine",
        "linear_with_warmup": "linear",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
        "inverse_square_root": "inverse_sqrt",
        "reduce_lr_on_plateau": "plateau",
        "reducelronplateau": "plateau",
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
