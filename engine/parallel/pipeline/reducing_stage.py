"""Stages of torch's pipelines that count each token once, and reduce gradients more often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from ....model_zoo.layers.moe import moe_layers


class CountingStage(PipelineStage):
    """Lets routers count the tokens of a micro batch once, however many backward passes it has.

    A compiled block runs all of its backward pass for the gradients of inputs, and all of it again
    for those of weights (torch 2.13), with what its routers count there.

    A stage in which one use of the embedding leads to another has one backward pass for both.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run one backward pass; that for weights alone leaves the counts as they are.

        Args:
            backward_type: "full", "input", or "weight": which gradients are computed.
            bwd_kwargs: the outputs and gradients of the pass.
            last_backward: whether it is the stage's last one of the step.
        """
        if self.submod.has_whole_backward and backward_type != "full":
            # torch (2.13) takes the gradients of all uses of a weight at once, and cannot where one
            # use leads to another. The pass for inputs computes both kinds.
            if backward_type == "weight":
                return (), None
            (loss,) = bwd_kwargs["stage_output"]
            whole = bwd_kwargs | {"stage_output": loss}
            return super().backward_maybe_with_nosync("full", whole, last_backward)[0], []
        is_repeated = backward_type == "weight"
        layers = moe_layers(self.submod).values() if is_repeated else ()
        counts = [layer.load_counter.clone() for layer in layers]
        found = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        for layer, count in zip(layers, counts, strict=True):
            # As the counter is written: compiled blocks have saved it for backward passes to come.
            layer.load_counter.data.copy_(count)
        return found


class ReducingStage(CountingStage):
    """Lets FSDP reduce-scatter after each micro batch, where torch's stage does so once a step.

    A rank then holds the sharded sum of the gradients, not that of whole ones. Weights stay
    gathered between micro batches, as the schedule wants them.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run one backward pass, and reduce what it added to the gradients of weights.

        Args:
            backward_type: "full", "input", or "weight": which gradients are computed.
            bwd_kwargs: the outputs and gradients of the pass.
            last_backward: whether it is the stage's last one of the step.
        """
        found = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type != "input":
            for group in _parameter_groups(self.submod):
                _accumulate(group)
            # The schedule itself reduces after the last pass, and only then over replicas (HSDP).
            if not last_backward:
                reduce_scatter_gradients(self.submod)
        return found


def hold_gradients(module: Any) -> None:
    """Let a stage's FSDP modules keep weights gathered and gradients whole after a backward pass.

    torch's stage does so in the first backward pass of its own, and the last stage may have one
    before that, which runs the hooks of an embedding that belongs to the first stage.
    """
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)


def reduce_scatter_gradients(module: Any) -> None:
    """Reduce-scatter the gradients that the modules of FSDP hold, and keep weights gathered.

    Args:
        module: a module of FSDP; sums over replicas are left for later.
    """
    module.set_requires_gradient_sync(True)
    module.set_requires_all_reduce(False)
    for group in _parameter_groups(module):
        group.post_backward()
    module._get_fsdp_state()._root_post_backward_final_callback()
    module.set_requires_all_reduce(True)


def _parameter_groups(module: Any) -> Iterator[Any]:
    """Yield FSDP's groups of parameters of a module and of those inside it."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            state: Any = each._get_fsdp_state()
            # torch 2.11 has one group of parameters a module, later versions a list.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            yield from filter(None, groups)


def _accumulate(group: Any) -> None:
    """Let all gradients of a group have the dtype of the reduction where some have it.

    Passes that are split leave some gradients as FSDP accumulates them and others as they were
    computed, and FSDP (torch 2.13) reduces those of one dtype alone.
    """
    missing = [each for each in group.fsdp_params if each.unsharded_accumulated_grad is None]
    if len(missing) < len(group.fsdp_params):
        for parameter in missing:
            parameter.to_accumulated_grad_if_needed()
