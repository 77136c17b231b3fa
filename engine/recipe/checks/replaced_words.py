"""Words of torch's first FSDP, and of the contract, that a recipe cannot use: what to write."""

from __future__ import annotations

from ...core.text.positions import KeyPath

_KEYS = {
    "sharding_strategy": "write strategy",
    "backward_prefetch": "write prefetch: how many blocks ahead, in forward and backward",
    "forward_prefetch": "write prefetch: how many blocks ahead, in forward and backward",
    "limit_all_gathers": "leave it out: memory needs no limit where prefetch is small",
    "use_orig_params": "leave it out: parameters always keep their names and shapes",
    "sync_module_states": "leave it out: initial weights are the same on each rank",
    "cpu_offload": "write offload = true",
    "auto_wrap_policy": "leave it out: each of the model's blocks is a unit",
    "mixed_precision": "see [precision]: compute and reduce",
    "ignored_modules": "write ignored: patterns of parameter names",
    "ignored_states": "write ignored: patterns of parameter names",
    "ignored_parameters": "write ignored: patterns of parameter names",
    "state_dict_type": "leave it out: checkpoints hold shards and load under any plan",
    "state_dict_config": "leave it out: checkpoints hold shards and load under any plan",
    "optim_state_dict_config": "leave it out: checkpoints hold shards and load under any plan",
    "param_init_fn": "leave it out: weights get their memory after they are sharded",
    "device_id": "leave it out: each rank takes the GPU of its local rank",
    "device_mesh": "leave it out: the degrees of [parallel] make the mesh",
    "process_group": "leave it out: the degrees of [parallel] make the groups",
    "activation_checkpointing": "see memory.recompute",
    "min_num_params": "leave it out: each of the model's blocks is a unit",
    "transformer_layer_cls_to_wrap": "leave it out: each of the model's blocks is a unit",
}
_RESHARDS = {True: "full_shard", False: "shard_grad_op"}
"""strategies for the two values that FSDP2's own key has beside a number"""
_STRATEGIES = {
    "full_shard": "full_shard",
    "shard_grad_op": "shard_grad_op",
    "no_shard": "no_shard",
    "hybrid_shard": "hybrid_shard",
    "_hybrid_shard_zero2": "hybrid_shard_zero2",
}
_VALUES = {
    "BACKWARD_PRE": "leave prefetch out, or write how many blocks are gathered ahead",
    "BACKWARD_POST": "leave prefetch out: the next block is always gathered early",
    "FULL_STATE_DICT": "for whole weights see checkpoint.export and trainer convert-ckpt",
    "LOCAL_STATE_DICT": "leave it out: checkpoints hold shards and load under any plan",
    "SHARDED_STATE_DICT": "leave it out: checkpoints hold shards, as here",
}


def replacement(path: KeyPath, value: object) -> str:
    """Return what to write in place of a key or a value of FSDP1; empty: it is none."""
    if path[:2] != ("parallel", "fsdp") or len(path) < 3:
        return ""
    if path[2] == "reshard_after_forward" and isinstance(value, bool):
        return f'write strategy = "{_RESHARDS[value]}"'
    word = value.rpartition(".")[2] if isinstance(value, str) else ""
    strategy = _STRATEGIES.get(word.lower())
    # FSDP1 writes its strategies in capitals; our own spelling is no word to replace.
    if strategy and word not in _STRATEGIES.values():
        return f'FSDP1\'s word: write strategy = "{strategy}"'
    if path[2] == "strategy" and not strategy:
        return ""
    found = _VALUES.get(word) or _KEYS.get(str(path[2]))
    return f"FSDP1's word: {found}" if found else ""


_UNAVAILABLE = [("kernels", "attention", "triton")]


def unavailable(path: KeyPath, value: object) -> str:
    """Return a message if the contract has this key or word and this version does not."""
    is_known = (*path, value) in _UNAVAILABLE
    return f'"{value}" is not available in this version' if is_known else ""
