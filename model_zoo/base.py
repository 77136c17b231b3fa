"""What the engine needs of a module that it trains, and defaults that suit a plain `nn.Module`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Normal:
    """Initial values: normal with this standard deviation, cut off at three of them."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initial values: all the same."""

    value: float


def shift(x: Tensor, count: int, fill: int, document_ids: Tensor | None = None) -> Tensor:
    """Return each position's value `count` positions later, of x [B, S].

    Args:
        x: the values.
        count: how many positions later.
        fill: the value where the row or the document ends before that position.
        document_ids: [B, S] of whole rows; None: rows alone have ends.
    """
    later = F.pad(x[:, count:], (0, min(count, x.shape[1])), value=fill)
    if document_ids is None:
        return later
    return later.where(shift(document_ids, count, -1) == document_ids, fill)


class Model(nn.Module):
    """A module that the engine can train.

    A subclass needs only a constructor and a `forward(**fields)` that takes the task's fields of a
    batch by name. Parameters stay in fp32; under a lower compute dtype torch casts them for each
    operation (autocast). The engine builds the module without storage and fills it afterwards, so
    that values set in the constructor are lost: `initial_values` and `init_buffers` give them.
    """

    autocasts: ClassVar[bool] = True
    """whether the forward pass runs under autocast; False where layers cast weights themselves"""

    compute_dtype: torch.dtype = torch.float32
    remote_parameters: Mapping[str, tuple[int, ...]] = {}
    """names and shapes of the parameters that other pipeline stages hold instead of this rank"""
    remote_buffers: Mapping[str, tuple[int, ...]] = {}
    """names and shapes of the saved buffers that other pipeline stages hold instead of this rank"""
    takes_max_documents: bool = False
    """whether `forward` takes the most documents of a row beside their ids; not where attention
    needs a mask, as for capped scores: without the number it is made once for all blocks"""
    takes_padding: bool = False
    """whether `forward` takes `padding_mask`"""
    own_positions: Callable[[Tensor], Tensor] = staticmethod(lambda whole: whole)
    """maps [B, S] of whole rows to the positions of this rank, where ranks share a sequence"""
    own_hidden: Callable[[Tensor], Tensor] = staticmethod(lambda gathered: gathered)
    """maps [B, S, D] that a norm has gathered to the positions that this rank's blocks take"""
    shift: Callable[[Tensor, int, int, Tensor | None], Tensor] = staticmethod(shift)
    """see `shift`; where ranks share a sequence, of this rank's positions"""

    def __call__(self, *args: Any, **fields: Any) -> Any:
        """Run the forward pass and its hooks, under autocast where the class asks for it."""
        if not self.autocasts or self.compute_dtype in (torch.float32, torch.float64):
            return super().__call__(*args, **fields)
        tensors = (x for x in (*args, *fields.values()) if isinstance(x, Tensor))
        device = next(tensors, torch.empty(0)).device
        with torch.autocast(device.type, self.compute_dtype, enabled=device.type != "meta"):
            return super().__call__(*args, **fields)

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return what is saved with the weights and not trained, by name."""
        # The state dict leaves out the buffers that are not persistent.
        saved = self.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.named_buffers() if name in saved}

    @property
    def remote_state(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the saved parameters and buffers of other pipeline stages."""
        return {**self.remote_parameters, **self.remote_buffers}

    def initial_values(self, name: str) -> Normal | Constant:
        """Return the rule by which the parameter `name` starts.

        By default biases are 0, other vectors and scalars 1 (the scales of norms), and weights of
        more dimensions normal with a standard deviation of 1 / sqrt(fan_in) (LeCun et al. 1998,
        "Efficient BackProp", section 4.6).
        """
        shape = self.get_parameter(name).shape
        if name.endswith("bias"):
            return Constant(0.0)
        return Normal(math.prod(shape[1:]) ** -0.5) if len(shape) > 1 else Constant(1.0)

    def init_buffers(self, device: torch.device) -> None:
        """Fill the buffers, which have memory on `device` and no values yet.

        By default each submodule fills its own, by `init_buffers` or, as torch's batch norms do, by
        `reset_running_stats`.

        Raises:
            NotImplementedError: a submodule has buffers and neither method.
        """
        _init_buffers(self, device, type(self).__name__)


def _init_buffers(module: nn.Module, device: torch.device, model: str, path: str = "") -> None:
    """Fill the buffers of a module and of its submodules; see `Model.init_buffers`."""
    if reset := getattr(module, "reset_running_stats", None):
        reset()
    elif names := [f"{path}{name}" for name, _ in module.named_buffers(recurse=False)]:
        raise NotImplementedError(f"{model}.init_buffers must fill {', '.join(names)}")
    for name, child in module.named_children():
        if fill := getattr(child, "init_buffers", None):
            fill(device)
        else:
            _init_buffers(child, device, model, f"{path}{name}.")
