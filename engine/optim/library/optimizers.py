"""Recipe tables of the optimizers of torch.optim, made from the table of their signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, create_model

from ...core.errors import Problem, RecipeError
from ..tables import OptimizerConfig
from .table import OPTIMIZERS, PREFIX, make_fields

if TYPE_CHECKING:
    import torch

GROUP_KEYS = {"lr", "weight_decay", "betas", "eps", "momentum"}
FUSED = {"Adam", "AdamW"}
"""optimizers whose fused kernel runs on CPUs, on GPUs and on shards"""


class TorchOptimizer(OptimizerConfig):
    """Base of the tables of optimizers of torch."""

    torch_name: ClassVar[str]
    """the class of torch.optim"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the optimizer over lists of tensors, or fused.

        Raises:
            RecipeError: torch refuses a value.
        """
        import torch

        make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, self.torch_name)
        options = {key: getattr(self, key) for key in OPTIMIZERS[self.torch_name]}
        options["fused" if self.torch_name in FUSED else "foreach"] = True
        is_on_gpu = groups[0]["params"][0].is_cuda
        if is_on_gpu and "capturable" in make.__init__.__annotations__:
            # The number of steps is on the device then, and no step waits for it.
            options["capturable"] = self.torch_name not in FUSED
        try:
            optimizer = make(groups, **options)
        except ValueError as error:
            raise RecipeError([Problem(str(error), key="optimizer")]) from error
        if self.torch_name == "ASGD" and not is_on_gpu:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    # As torch's first step would, but a simulation knows these numbers.
                    state = optimizer.state[weight]
                    state |= {"step": torch.tensor(0.0), "eta": torch.tensor(group["lr"])}
                    state |= {"mu": torch.tensor(1.0), "ax": torch.zeros_like(weight)}
        for weight, state in optimizer.state.items():
            if weight.dtype is torch.bfloat16:  # Adagrad's sum exists before the first step
                state.update({key: value.float() for key, value in state.items()})
        return optimizer


def __getattr__(name: str) -> type[TorchOptimizer]:
    """Make the table of an optimizer when a recipe names it."""
    if name not in OPTIMIZERS:
        raise AttributeError(name)
    fields: dict[str, Any] = make_fields(OPTIMIZERS[name])
    fields["name"] = (Literal[f"{PREFIX}{name}"], f"{PREFIX}{name}")
    if "weight_decay" not in fields:
        text = f"{name} has no weight decay"
        fields["weight_decay"] = (Literal[0], Field(0, description=text))
    config = create_model(name, __base__=TorchOptimizer, __module__=__name__, **fields)
    config.__doc__ = f"`torch.optim.{name}`, with the keys and the defaults of torch."
    config.torch_name = name
    config.group_keys = frozenset(GROUP_KEYS & OPTIMIZERS[name].keys())
    globals()[name] = config
    return config
