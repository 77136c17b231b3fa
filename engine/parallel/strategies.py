"""The strategies of `parallel.fsdp`: what FSDP does with parameters. Torch-free."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..core.config import Component
from ..core.registry import Registry


class Strategy(Component):
    """What FSDP does with parameters; a subclass says by class attributes how it differs.

    Attributes:
        shards: whether parameters, gradients and optimizer state are sharded at all.
        reshard_after_forward: what FSDP2 does with a block's gathered parameters after its forward
            pass: True frees them, False keeps them for the backward pass, and a number shards them
            over so many ranks.
        needs_replicas: whether the strategy is meant for a replicate axis of more than one rank.
        without_replicas: name of the strategy that does the same without a replicate axis.
    """

    shards: ClassVar[bool] = True
    reshard_after_forward: ClassVar[bool | int] = True
    needs_replicas: ClassVar[bool] = False
    without_replicas: ClassVar[str] = ""


strategies: Registry[Strategy] = Registry("strategy", default="full_shard")


@strategies.register
class FullShard(Strategy):
    """Gathers weights for the forward pass and again for the backward pass (ZeRO-3)."""

    name: Literal["full_shard"] = "full_shard"


@strategies.register
class ShardGradOp(Strategy):
    """Keeps the gathered weights between the two passes (ZeRO-2)."""

    name: Literal["shard_grad_op"] = "shard_grad_op"
    reshard_after_forward = False


@strategies.register
class NoShard(Strategy):
    """Replicates weights."""

    name: Literal["no_shard"] = "no_shard"
    shards = False


@strategies.register
class HybridShard(Strategy):
    """Does what full_shard does inside the shard axis, and replicates over the other."""

    name: Literal["hybrid_shard"] = "hybrid_shard"
    needs_replicas = True
    without_replicas = "full_shard"


@strategies.register
class HybridShardZero2(Strategy):
    """Does what shard_grad_op does inside the shard axis, and replicates over the other."""

    name: Literal["hybrid_shard_zero2"] = "hybrid_shard_zero2"
    reshard_after_forward = False
    needs_replicas = True
    without_replicas = "shard_grad_op"
