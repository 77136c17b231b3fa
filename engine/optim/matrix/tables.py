"""Tables of the optimizers that update matrices as wholes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from ...core.config import DEFAULTS, Betas, Count, Decay, Table
from ..tables import NonNegativeFloat, OptimizerConfig, PositiveFloat, Rates, optimizers

if TYPE_CHECKING:
    import torch

LEAST_LR = 1e-4
"""a rate of `scale = "original"` below this is likely to be one that was tuned for AdamW"""


class AdamWKeys(Table):
    """AdamW's keys for parameters that are no matrices: embeddings, heads, norms, biases."""

    lr: NonNegativeFloat | None = None
    """peak learning rate of these parameters; default: that of [optimizer]"""
    weight_decay: NonNegativeFloat | None = None
    """decoupled weight decay of these parameters; default: that of [optimizer]"""
    betas: Betas = (0.9, 0.95)
    """decay of the running means of the gradient and of its square"""
    eps: PositiveFloat = 1e-8
    """added to the denominator"""


class HyperballAdamWKeys(AdamWKeys):
    """AdamW's keys for parameters that are no matrices, beside matrices that keep their norms."""

    lr: NonNegativeFloat = 3e-4
    """peak learning rate of these parameters; not that of [optimizer], which is a share of the
    matrices' norms and far too large for AdamW"""


class MatrixConfig(OptimizerConfig):
    """Base of the tables of optimizers that `MatrixOptimizer` implements."""

    needs_matrices = True
    implementation: ClassVar[str]
    """module and class of the optimizer, whose options are the keys of this table"""
    group_keys = frozenset({"lr", "weight_decay", "betas", "eps"})

    adamw: AdamWKeys = DEFAULTS
    """AdamW's keys for embeddings, heads, norms and biases"""

    def rates_of(self, *, is_matrix: bool) -> Rates:
        """Return the rate and the decay of matrices, or of all other parameters."""
        table = self.adamw
        if is_matrix:
            return super().rates_of(is_matrix=True)
        return Rates(
            self.lr if table.lr is None else table.lr,
            self.weight_decay if table.weight_decay is None else table.weight_decay,
        )

    def named_rates(self) -> dict[str, float]:
        """Return the peak rates beside `lr`: of what AdamW updates, and of groups."""
        rate = self.rates_of(is_matrix=False)
        found = {"lr_adamw": rate.lr, **super().named_rates()}
        for index, group in enumerate(self.groups):
            if group.lr_scale is not None and rate.lr != self.lr:
                found[f"lr_adamw_group_{index}"] = group.lr_scale * rate.lr
        return found

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the optimizer over groups that `parameter_groups` made with placements."""
        module, name = self.implementation.split(":")
        make: Callable[..., torch.optim.Optimizer]
        make = getattr(import_module(f".{module}", __package__), name)
        rates = self.rates_of(is_matrix=False)
        adamw = {**rates._asdict(), "betas": self.adamw.betas, "eps": self.adamw.eps}
        # Values of their own, because the optimizer's defaults are those of matrices.
        groups = [group if group["is_matrix"] else {**adamw, **group} for group in groups]
        return make(groups, device, adamw, **self.options(device))

    def options(self, device: torch.device) -> dict[str, Any]:
        """Return the optimizer's options for groups of matrices."""
        return self.model_dump(exclude={"name", "clip_norm", "groups", "adamw"})


class OrthogonalConfig(MatrixConfig):
    """Base of the tables of optimizers that orthogonalize matrices."""

    sends_gradients: ClassVar[bool] = False
    """whether owners get gradients, in the dtype of the weights, in the place of momenta"""

    orthogonalize_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """dtype in which matrices are multiplied and sent; "fp32": that of the weights; "auto": "bf16"
    on GPUs, else "fp32" """
    ns_steps: Count = 5
    """Newton-Schulz iterations"""
    cautious_decay: bool = False
    """decay only the elements that the update moves towards 0 (arXiv:2510.12402)"""
    by_head: bool = False
    """orthogonalize the rows of each attention head by themselves, in the projections of queries,
    keys and values"""

    @property
    def updates_heads(self) -> bool:
        """Whether the rows of each attention head are a matrix of their own."""
        return self.by_head

    def for_gpu(self) -> Self:
        """Return the table with what its "auto" means on a GPU."""
        if self.orthogonalize_dtype != "auto":
            return self
        return self.model_copy(update={"orthogonalize_dtype": "bf16"})

    def options(self, device: torch.device) -> dict[str, Any]:
        """Return the optimizer's options for groups of matrices."""
        options = {"nesterov": False, **super().options(device)}
        word = options.pop("orthogonalize_dtype")
        is_bf16 = word == "bf16" or (word == "auto" and device.type == "cuda")
        sends_bf16 = is_bf16 and not self.sends_gradients
        return {**options, "is_narrow": sends_bf16, "multiplies_in_bf16": is_bf16}


class MomentumConfig(OrthogonalConfig):
    """Base of the tables of optimizers that orthogonalize momenta, which are sharded."""

    matrix_keys = frozenset({"momentum"})
    group_keys = MatrixConfig.group_keys | {"momentum"}

    momentum: Decay = 0.95
    """decay of the running mean of the gradients of matrices"""
    nesterov: bool = True
    """look ahead along the momentum"""


class ScaledConfig(OrthogonalConfig):
    """Base of the tables of optimizers that scale orthogonal updates by their shape."""

    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """what multiplies an update: "match_rms_adamw", 0.2 sqrt(max(rows, columns)), so that AdamW's
    rates suit (arXiv:2502.16982); "original", sqrt(max(1, rows / columns))"""

    def warnings(self) -> Iterator[str]:
        """Yield what is likely to be a mistake."""
        is_adamws = self.lr < LEAST_LR or "lr" not in self.model_fields_set
        if self.scale == "original" and is_adamws:
            yield (
                f'optimizer.lr = {self.lr:g} is a rate for AdamW: with scale = "original" matrices '
                'hardly move; take about 0.02, or scale = "match_rms_adamw"'
            )


@optimizers.register
class Muon(ScaledConfig, MomentumConfig):
    """Momentum that is orthogonalized, matrix by matrix; AdamW for what is no matrix."""

    implementation = "muon:MuonOptimizer"

    name: Literal["muon"] = "muon"


@optimizers.register
class MuonClip(Muon):
    """Muon, and queries and keys that shrink where attention scores grow (arXiv:2507.20534)."""

    implementation = "muonclip:MuonClipOptimizer"
    bounds_scores = True

    name: Literal["muonclip"] = "muonclip"  # type: ignore[assignment]  # a table of its own name
    max_score: PositiveFloat = 100.0
    """largest attention score of a head in a step above which its queries and keys shrink"""


@optimizers.register
class NorMuon(Muon):
    """Muon whose updates have rows of about equal size (arXiv:2510.05491)."""

    implementation = "normuon:NorMuonOptimizer"

    name: Literal["normuon"] = "normuon"  # type: ignore[assignment]  # a table of its own name
    beta2: Decay = 0.95
    """decay of the running mean of the squares of each row"""
    eps: PositiveFloat = 1e-8
    """added to the root of these means"""


@optimizers.register
class SOAP(MatrixConfig):
    """Adam in the eigenbases of the covariances of rows and columns (arXiv:2409.11321)."""

    implementation = "soap:SOAPOptimizer"
    has_owned_state = True
    keys_of_both = MatrixConfig.group_keys

    name: Literal["soap"] = "soap"
    betas: Betas = (0.95, 0.95)
    """for matrices, decay of the running mean of the gradient, and of that of its square and of the
    covariances"""
    eps: PositiveFloat = 1e-8
    """for matrices, added to the denominator"""
    basis_interval: Count = 10
    """steps between updates of the eigenbases"""
    max_factor_dim: Count = 10_000
    """rows, or columns, of the largest matrix of which they have a covariance and a basis"""
    cautious_decay: bool = False
    """decay only the elements that the update moves towards 0 (arXiv:2510.12402)"""

    def options(self, device: torch.device) -> dict[str, Any]:
        """Return the optimizer's options for groups of matrices."""
        # Gradients travel in the dtype of the weights: they make covariances.
        return {**super().options(device), "nesterov": False, "is_narrow": False}


@optimizers.register
class SOAPMuon(SOAP, ScaledConfig):
    """SOAP whose updates are orthogonalized as Muon's are (Vyas 2026)."""

    implementation = "soap:SOAPMuonOptimizer"
    sends_gradients = True

    name: Literal["soap_muon"] = "soap_muon"  # type: ignore[assignment]  # as in NorMuon


@optimizers.register
class Dion2(ScaledConfig):
    """Muon of a share of the rows or columns of each matrix in a step (arXiv:2512.16928)."""

    implementation = "dion2:Dion2Optimizer"
    has_owned_state = True
    sends_gradients = True
    matrix_keys = frozenset({"momentum"})
    group_keys = MatrixConfig.group_keys | {"momentum"}

    name: Literal["dion2"] = "dion2"
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    """share of the rows, or of the columns where these are fewer, that a step orthogonalizes"""
    momentum: Decay = 0.95
    """decay, in the sum of the gradients of a matrix, of the rows or columns of this step"""


@optimizers.register
class MuonH(MomentumConfig):
    """Muon that keeps the norm of each matrix, "hyperball" (arXiv:2606.16899)."""

    implementation = "hyperball:MuonHOptimizer"

    name: Literal["muonh"] = "muonh"
    lr: NonNegativeFloat = 0.01
    """peak learning rate of matrices, as a share of their norms; the schedule multiplies it"""
    weight_decay: NonNegativeFloat = 0.1
    """decoupled weight decay of parameters that are no matrices; matrices keep their norms"""
    adamw: HyperballAdamWKeys = DEFAULTS
    """AdamW's keys for embeddings, heads, norms and biases"""


@optimizers.register
class AdamH(MatrixConfig):
    """Adam that keeps the norm of each matrix, "hyperball" (arXiv:2606.16899)."""

    implementation = "adamh:AdamHOptimizer"
    keys_of_both = MatrixConfig.group_keys

    name: Literal["adamh"] = "adamh"
    lr: NonNegativeFloat = 0.01
    """peak learning rate of matrices, as a share of their norms; the schedule multiplies it"""
    weight_decay: NonNegativeFloat = 0.1
    """decoupled weight decay of parameters that are no matrices; matrices keep their norms"""
    betas: Betas = (0.9, 0.95)
    """for matrices, decay of the running means of the gradient and of its square"""
    eps: PositiveFloat = 1e-8
    """added to the denominator of the directions of matrices"""
    adamw: HyperballAdamWKeys = DEFAULTS
    """AdamW's keys for embeddings, heads, norms and biases"""
