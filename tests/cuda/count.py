"""Counts what a step does that a GPU would pay for: waits, masks, kernels, graph breaks."""

from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cuda.device import DEVICE, Stream
from trainer.engine.data.batch import TokenBatch
from trainer.engine.doctor import graphs
from trainer.engine.estimate.simulate import build
from trainer.engine.estimate.simulate.build import simulate_rank, step_batches
from trainer.engine.estimate.simulate.torch_internals import replace_attribute
from trainer.engine.parallel import expert
from trainer.engine.train.health import Health
from trainer.kernels.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    active_fake_mode,
    tree_leaves,
)

READ = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal"}
"""operators whose result the host must know"""
NO_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_"}
NO_KERNEL |= {"lift_fresh", "record_stream", "wait_tensor"}


class Cost(TorchDispatchMode):
    """Counts the operators on the imaginary GPU, and those for which the host waits.

    Attributes:
        kernels: operators that launch kernels. A Triton operator of ours counts once.
        ours: the operators among them that are our own, by name.
        waits: how often the host waits for the device, by what makes it wait.
        mask_bytes: bytes of the masks that attention is given.
    """

    def __init__(self):
        super().__init__()
        self.kernels = self.mask_bytes = 0
        self.ours, self.waits = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        name = func.overloadpacket.__name__
        on_gpu = any(device_of(each) == "cuda" for each in given)
        if name in READ and on_gpu:
            self.waits[name] += 1
            return read(name, given[0])
        out = func(*args, **kwargs)
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        is_on_gpu = any(device_of(each) == "cuda" for each in made)
        if on_gpu or is_on_gpu:
            self._count(func, name, given, made, kwargs, args)
        return out

    def _count(self, func, name, given, made, kwargs, args):
        is_copy = name in ("_to_copy", "copy_") and given
        if is_copy:
            source = given[-1] if name == "copy_" else given[0]
            target = given[0] if name == "copy_" else made[0]
            ends = device_of(source), device_of(target)
            is_async = kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,))
            if ends[0] != ends[1] and not is_async:
                self.waits[f"copy {ends[0]} to {ends[1]}"] += 1
        makes_view = any(
            each.alias_info and not each.alias_info.is_write for each in func._schema.returns
        )
        if name in NO_KERNEL or makes_view:
            return
        self.kernels += 1
        if func.namespace == "trainer":
            self.ours[name] += 1
        if name == "_grouped_mm" and torch.cuda.get_device_capability()[0] not in (9, 10):
            self.waits[name] += 1  # the fallback copies the offsets to the host

    def attend(
        self,
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        """Compute as SDPA of a CUDA build does: flash, or another fused kernel with a mask."""
        if attn_mask is None:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        self.mask_bytes += attn_mask.untyped_storage().nbytes()
        bias = attn_mask
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -torch.inf)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:  # this kernel takes as many heads of keys as of queries
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        bias = bias.expand(*query.shape[:3], key.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]

    def balanced(self, original, *given):
        """Return the loads that a simulation assumes, which a run would read from the device."""
        self.waits["sizes of an all-to-all"] += 1
        return original(*given)


def device_of(tensor):
    """Return the type of the device on which a tensor would be."""
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type


def read(name, tensor):
    """Return what an operator reads, as if all values were one."""
    if name == "_local_scalar_dense":
        return 1.0 if tensor.is_floating_point() else 1
    if name == "equal":
        return True
    if name == "nonzero":
        return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
    raise NotImplementedError(f"{name}: the shape of its result depends on values on the device")


class Everything:
    """Contains all names."""

    def __contains__(self, name):
        return True


def _bound_documents(batch):
    """Bound the documents of a row, which the host counts from numbers that are not there."""
    return batch if batch.document_ids is None else replace(batch, max_documents=8)


@contextmanager
def on_imaginary_gpu():
    """Let simulations build models on the GPU, with the kernels that recipes ask for."""
    torch.utils._device._device_constructors()  # remembers the functions that it knows
    empty = torch.empty

    def allocate(*size, **options):
        # FSDP makes an empty buffer before tensors are fake.
        if not active_fake_mode() and "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        return empty(*size, **options)

    no_move = "torch.distributed.fsdp._fully_shard._fsdp_init"
    with ExitStack() as stack:
        for owner, name, value in (
            (build, "CPU", DEVICE),
            (build, "AVAILABLE", Everything()),
            (torch, "empty", allocate),
            (TokenBatch, "count_documents", _bound_documents),
            (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
            (import_module(no_move), "_move_states_to_device", lambda *_: None),
        ):
            stack.enter_context(replace_attribute(owner, name, value))
        yield


def count_step(recipe, ranks, vocab_size, inject=lambda step: None):
    """Count what the second step of the last rank does, operator by operator.

    Args:
        recipe: validated for that many ranks.
        ranks: the world size.
        vocab_size: of the tokenizer.
        inject: changes the step before it runs.
    """
    cost = Cost()
    with (
        on_imaginary_gpu(),
        simulate_rank(recipe, ranks - 1, ranks, vocab_size) as (
            recipe,
            step,
            plan,
        ),
    ):
        inject(step)
        health = examine(recipe, step)
        for _ in range(2):  # the first one makes the optimizer's state
            batches = step_batches(recipe.data, step, plan)
            before = Stream.waits
            cost.__init__()
            balanced = partial(cost.balanced, expert.balanced_counts)
            with (
                replace_attribute(F, "scaled_dot_product_attention", cost.attend),
                replace_attribute(expert, "balanced_counts", balanced),
                cost,
            ):
                gradients = step.accumulate(batches, lr_factor=1.0)
                if health is None or health.should_step(gradients, 1, batch=1, lr=1.0):
                    step.update(1.0, health and health.is_bad)
                step.clear()
    if Stream.waits > before:
        cost.waits["synchronize"] += Stream.waits - before
    return {
        "waits": dict(sorted(cost.waits.items())),
        "mask_bytes": cost.mask_bytes,
        "kernels": cost.kernels,
        "ours": dict(sorted(cost.ours.items())),
    }


def examine(recipe, step):
    """Return what looks at each step of a recipe, unless it only stops the run later."""
    table, able = recipe.resilience, step.weight_update.can_skip
    if table.non_finite == "stop":
        return None
    return Health(table, torch.device("cuda"), step.scale, print, can_skip=able)


def count_graphs(recipe, ranks, vocab_size):
    """Count the graphs that a run compiles, their operations and what breaks them."""

    def one_length(recipe, unit):
        return [recipe.data.seq_len]  # another one takes SDPA's path that has no CUDA kernel here

    torch.compiler.reset()  # sizes of cases before would make those of this one symbols
    with on_imaginary_gpu(), replace_attribute(graphs, "_lengths", one_length):
        parts = graphs.trace(recipe, ranks, vocab_size)
    return {
        "graphs": sum(part.graphs for part in parts),
        "graph_operations": sum(part.operations for part in parts),
        "graph_breaks": sorted(each.reason for part in parts for each in part.breaks),
    }
