"""What every model family's config offers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from .hf_settings import SettingsError, inconsistent, sizes_of, validate
from .layout import Layout

if TYPE_CHECKING:
    from ..kernels.choose import Kernels
    from .language_model import LanguageModel

Size = Annotated[int, Field(ge=1, le=2**31)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Sizes(BaseModel):
    """A closed, frozen table of sizes; TOML types are taken as they are."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelConfig(Sizes):
    """Sizes of one model. A flavor names a set of them; any key given beside it wins."""

    flavors: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    layout: ClassVar[Layout]

    name: str
    """which model family"""
    flavor: str = "debug"
    """a named size of the family; every other key overrides one of its fields"""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_flavor(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        flavor = values.get("flavor", cls.model_fields["flavor"].default)
        if not isinstance(flavor, str) or flavor not in cls.flavors:
            raise PydanticCustomError(
                "unknown_flavor",
                'no flavor is named "{flavor}"; known: {known}',
                {"flavor": str(flavor)[:80], "known": ", ".join(cls.flavors)},
            )
        filled = {**cls.flavors[flavor], **values}
        for key, table in cls.flavors[flavor].items():
            if isinstance(table, dict) and isinstance(values.get(key), dict):
                filled[key] = {**table, **values[key]}
        return filled

    @property
    def vocab(self) -> int:
        """Rows of the embedding, once settled."""
        raise NotImplementedError

    @property
    def embed_cost(self) -> float:
        """What the embedding costs to look up and to train, where a block costs 1."""
        return 0.0

    @property
    def head_cost(self) -> float:
        """What the head costs to compute, where a block costs 1: a pipeline is cut by it."""
        return 0.0

    def unsplittable(self, axis: str) -> str:
        """Return why ranks of an axis cannot share a model of these sizes; empty: they can."""
        return ""

    def require_hf(self) -> None:
        """Raise a ValueError of what the Hugging Face models of the family cannot be."""

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every parameter, in the module's order.

        The vocabulary is settled. Empty where a family does not say: what depends on it is then
        known only once the module is built.
        """
        return {}

    def with_vocab(self, vocab_size: int) -> Self:
        """Return the config with its vocabulary size settled.

        A config that leaves it open takes the tokenizer's, rounded up to a multiple of 64.
        """
        raise NotImplementedError

    @classmethod
    def from_hf_config(cls, settings: Mapping[str, Any]) -> Self:
        """Return the config of a model that Hugging Face's config.json describes.

        Raises:
            SettingsError: all that is missing, impossible, or not done by this family.
        """
        found = validate(cls, sizes_of(settings, cls))
        if problems := inconsistent(settings, found):
            raise SettingsError(problems)
        return cast("Self", found)

    def hf_config(self) -> dict[str, Any]:
        """Return what Hugging Face's config.json says of this model; empty if it has no name there.

        `Layout.hf_keys` and `Layout.hf_possible` say which of it must agree when weights are read.
        """
        return {}

    def build(self, kernels: Kernels) -> LanguageModel:
        """Return the module on the current default device (`meta` while a run is assembled)."""
        raise NotImplementedError

    def flops_per_token(self, seq_len: int) -> float:
        """Return floating-point operations a token of one training step (forward and backward).

        Six a weight that multiplies, and causal attention counted at half (PaLM, arXiv:2204.02311,
        appendix B).
        """
        raise NotImplementedError
