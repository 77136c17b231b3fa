"""Names of PyTorch that are not public: every one that the trainer imports, and where it is.

PyTorch may move or remove such a name in any release. `python -m tests.torch_names 2.15.0` checks
this list, and `MEMBERS`, against the sources of a release without installing it; `CHECKED` holds
the releases that were checked.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import _CachedTorchDispatchMode as CachedTorchDispatchMode
    from torch.utils.checkpoint import _CachingTorchDispatchMode as CachingTorchDispatchMode

    __all__ = [
        "CachedTorchDispatchMode",
        "CachingTorchDispatchMode",
        "FakeTensor",
        "FakeTensorMode",
        "TorchDispatchMode",
    ]

CHECKED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")

_ATEN = "torch:ops.aten"
_DYNAMO = "torch._dynamo"
_INDUCTOR = "torch._inductor"
HOMES = {
    # Operations without a public function.
    "foreach_add": "torch:_foreach_add",
    "foreach_add_": "torch:_foreach_add_",
    "foreach_addcmul_": "torch:_foreach_addcmul_",
    "foreach_clamp_max_": "torch:_foreach_clamp_max_",
    "foreach_clamp_min_": "torch:_foreach_clamp_min_",
    "foreach_copy_": "torch:_foreach_copy_",
    "foreach_div": "torch:_foreach_div",
    "foreach_div_": "torch:_foreach_div_",
    "foreach_lerp": "torch:_foreach_lerp",
    "foreach_lerp_": "torch:_foreach_lerp_",
    "foreach_mul": "torch:_foreach_mul",
    "foreach_mul_": "torch:_foreach_mul_",
    "foreach_norm": "torch:_foreach_norm",
    "foreach_sign_": "torch:_foreach_sign_",
    "foreach_sqrt": "torch:_foreach_sqrt",
    "foreach_sub_": "torch:_foreach_sub_",
    "foreach_zero_": "torch:_foreach_zero_",
    "attend_flash": f"{_ATEN}._scaled_dot_product_flash_attention",
    "attend_flash_backward": f"{_ATEN}._scaled_dot_product_flash_attention_backward",
    "attend_flash_cpu": f"{_ATEN}._scaled_dot_product_flash_attention_for_cpu",
    "attend_flash_cpu_backward": f"{_ATEN}._scaled_dot_product_flash_attention_for_cpu_backward",
    "attend_flash_varlen": f"{_ATEN}._flash_attention_forward",
    "attend_flash_varlen_backward": f"{_ATEN}._flash_attention_backward",
    "attend_efficient": f"{_ATEN}._scaled_dot_product_efficient_attention",
    "attend_efficient_backward": f"{_ATEN}._scaled_dot_product_efficient_attention_backward",
    # Dispatch, autograd and tensor subclasses.
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives:AsyncCollectiveTensor",
    "CachedTorchDispatchMode": "torch.utils.checkpoint:_CachedTorchDispatchMode",
    "CachingTorchDispatchMode": "torch.utils.checkpoint:_CachingTorchDispatchMode",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "OpOverloadPacket": "torch._ops:OpOverloadPacket",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "active_fake_mode": "torch._guards:active_fake_mode",
    "current_autograd_node": "torch._C:_current_autograd_node",
    "current_dispatch_mode": "torch.utils._python_dispatch:_get_current_dispatch_mode",
    "current_graph_task_id": "torch._C:_current_graph_task_id",
    "dispatch_op_names": "torch._C:_dispatch_get_all_op_names",
    "graph_is_kept": "torch._C._autograd:_get_current_graph_task_keep_graph",
    "has_mkldnn": "torch._C:_has_mkldnn",
    "pop_mode_temporarily": "torch.utils._python_dispatch:_pop_mode_temporarily",
    "top_saved_tensors_hooks": "torch._C._autograd:_top_saved_tensors_default_hooks",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    # Process groups, FSDP, DTensor, pipelines.
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    "FileStore": "torch._C._distributed_c10d:FileStore",
    "PipelineAction": "torch.distributed.pipelining.schedules:_Action",
    "PipelineSchedule": "torch.distributed.pipelining.schedules:_PipelineSchedule",
    "PipelineScheduleRuntime": "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime",
    "PrefixStore": "torch._C._distributed_c10d:PrefixStore",
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop:ShardingPropagator",
    "Store": "torch._C._distributed_c10d:Store",
    "TCPStore": "torch._C._distributed_c10d:TCPStore",
    "all_to_all_single": "torch:ops._c10d_functional.all_to_all_single",
    "compute_local_shape_and_global_offset": (
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset"
    ),
    "enable_symm_mem_for_group": "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
    "fsdp_param_group": "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "functional_collectives": "torch.distributed._functional_collectives",
    "resolve_process_group": "torch.distributed.distributed_c10d:_resolve_process_group",
    "symmetric_memory": "torch.distributed._symmetric_memory",
    "wait_tensor": "torch:ops._c10d_functional.wait_tensor",
    # The compiler.
    "compile_fx": f"{_INDUCTOR}.compile_fx",
    "cpu_vec_isa": f"{_INDUCTOR}.cpu_vec_isa",
    "dynamo": _DYNAMO,
    "dynamo_counters": f"{_DYNAMO}.utils:counters",
    "functorch_config": "torch._functorch.config",
    "graph_break_reasons": f"{_DYNAMO}.utils:graph_break_reasons",
    "inductor": _INDUCTOR,
    "inductor_codecache": f"{_INDUCTOR}.codecache",
    "inductor_config": f"{_INDUCTOR}.config",
    # What the GPU's allocator recorded.
    "dump_memory_snapshot": "torch.cuda.memory:_dump_snapshot",
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
}
"""name in this module -> module, or "module:attribute" """

MEMBERS = {
    "torch._inductor.codecache": ("_HEADER_DIR", "_HEADER_LOCK_DIR"),
    "torch._inductor.config": ("_micro_pipeline_tp",),
    "torch._ops": ("_opname", "_schema"),
    "torch.distributed.distributed_c10d": ("_register_backend", "_set_default_backend"),
    "torch.distributed.fsdp._fully_shard._fsdp_param": (
        "_unsharded_param",
        "to_accumulated_grad_if_needed",
        "unsharded_accumulated_grad",
        "unsharded_param",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
        "FSDPParamGroup",
        "foreach_all_gather",
        "foreach_reduce",
        "fsdp_params",
        "post_backward",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state": (
        "_fsdp_param_group",
        "_root_post_backward_final_callback",
    ),
    "torch.distributed.fsdp._fully_shard._fully_shard": ("_get_fsdp_state",),
    "torch.distributed.pipelining.schedules": ("_prepare_schedule_with_comms", "_warmup_p2p"),
    "torch.distributed.pipelining.stage": ("_inference_mode", "_make_tensor_from_meta"),
    "torch.distributed.tensor._api": ("_local_tensor",),
    "torch.distributed.tensor._sharding_prop": ("_propagate_tensor_meta_non_cached",),
    "torch.nn.modules.module": (
        "_apply",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_modules",
        "_parameters",
    ),
    "torch.storage": ("_cdata",),
}
"""module of PyTorch -> attributes of its private objects that are read, replaced or set"""


def __getattr__(name: str) -> Any:
    # Lazy: many of these modules take long to import, and most runs need few of them.
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = HOMES[name].partition(":")
    found: Any = import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    globals()[name] = found
    return found
