"""The base class of every model family's config.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from pydantic import PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from .heads import HeadSettings, read_head
from .hf_settings import find_mismatches, flatten_settings, read_sizes
from .layout import Layout, Part, Shape
from .sizes import PositiveFloat, SettingsError, Size, Sizes, quote  # noqa: F401  # for plugins

if TYPE_CHECKING:
    from ..kernels.choose import Kernels
    from .base import Model
    from .matrices import HeadRows


def validate(
    family: type[ModelConfig], sizes: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Return the config object of some sizes, with the head that config.json describes.

    Args:
        family: the config class.
        sizes: a model table's values.
        settings: the content of config.json; None: the model has a language head.

    Raises:
        SettingsError: a value is impossible.
    """
    try:
        config = family.model_validate(sizes)
    except ValidationError as error:
        raise SettingsError([_sentence(each) for each in error.errors()]) from None
    head = read_head(settings or {})
    if head is not None and not family.takes_heads:
        raise SettingsError([f'model "{config.name}" has no head for {head.kind}'])
    return config.with_head(head)


def _sentence(error: Mapping[str, Any]) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ")
    key = ".".join(map(str, error["loc"]))
    return f"{key} = {quote(error['input'])}: {reason}" if key else reason


class ModelConfig(Sizes):
    """Sizes of one model. A flavor names a set of them; any key given beside it wins.

    A model that is no language model needs only `name` and `build`.

    Attributes:
        layout: where its modules are; the default names none, so that FSDP shards all as one unit.
        takes_lengths: whether `forward` takes `lengths`: samples of a flat row, without padding.
        default_task: the task of a recipe that names none: "language_modeling" for a class that
            defines `with_vocab`, "supervised" for others.
        takes_heads: whether `with_head` is for this family.
    """

    flavors: ClassVar[Mapping[str, Mapping[str, Any]]] = {"debug": {}}
    layout: ClassVar[Layout] = Layout()
    takes_lengths: ClassVar[bool] = False
    default_task: ClassVar[str] = "supervised"
    takes_heads: ClassVar[bool] = False

    _head: HeadSettings | None = PrivateAttr(default=None)
    _trains_predictions: bool = PrivateAttr(default=True)

    name: str
    """which model family"""
    flavor: str = "debug"
    """a named size of the family; every other key overrides one of its fields"""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "default_task" not in vars(cls) and "with_vocab" in vars(cls):
            cls.default_task = "language_modeling"

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
        # Tables merge by key: a recipe that gives `moe.num_experts` keeps the flavor's other keys.
        for key, table in cls.flavors[flavor].items():
            if isinstance(table, dict) and isinstance(values.get(key), dict):
                filled[key] = {**table, **values[key]}
        return filled

    @property
    def vocab(self) -> int:
        """Rows of the embedding, once settled; 0: the model embeds no tokens."""
        return 0

    @property
    def vocabulary_weights(self) -> frozenset[str]:
        """Names of the weights that have a row for each token."""
        return frozenset({f"{self.layout.embed}.weight", f"{self.layout.head}.proj.weight"})

    @property
    def task_head(self) -> HeadSettings | None:
        """The head in place of the language head; no key of a recipe, because the task says it."""
        return self._head

    def with_head(self, head: HeadSettings | None) -> Self:
        """Return the config of the same model with another head; None: the language head."""
        changed = self.model_copy()
        changed._head = head
        return changed

    @property
    def replaced_parameters(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the language model's parameters that a task's head replaces."""
        if self._head is None:
            return {}
        own, whole = self.parameter_shapes(), self.with_head(None).parameter_shapes()
        return {name: shape for name, shape in whole.items() if name not in own}

    @property
    def replaced_prefixes(self) -> tuple[str, ...]:
        """What the names of parameters and buffers begin with that the language model alone has."""
        blocks = f"{self.layout.blocks}."
        return tuple(
            f"{blocks}{name.removeprefix(blocks).partition('.')[0]}."
            if name.startswith(blocks)
            else name
            for name in self.replaced_parameters
        )

    @property
    def predictions(self) -> int:
        """How many further tokens are predicted, each by a block after the last layer."""
        return 0

    @property
    def trained_predictions(self) -> int:
        """How many of the further predictions are in the loss; the blocks of others are frozen."""
        return self.predictions if self._trains_predictions else 0

    def freeze_predictions(self) -> Self:
        """Return the config of the same model whose further predictions are in no loss.

        Their blocks are kept, so that a checkpoint of the model is still whole.
        """
        changed = self.model_copy()
        changed._trains_predictions = False
        return changed

    @property
    def frozen_prefixes(self) -> tuple[str, ...]:
        """What the names of parameters of blocks that no training step computes begin with."""
        return ()

    @property
    def is_tied(self) -> bool:
        """Whether the head multiplies with the embedding's weight."""
        return self._head is None and bool(getattr(self, "tie_embeddings", False))

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage of a pipeline computes with the embedding's weight."""
        return self.is_tied

    @property
    def embed_cost(self) -> float:
        """What the embedding costs to look up and to train, where a block costs 1."""
        return 0.0

    @property
    def head_cost(self) -> float:
        """What the head costs to compute, where a block costs 1: a pipeline is cut by it."""
        return 0.0

    @property
    def hf_body(self) -> str:
        """Where the Hugging Face model has the layers below its head."""
        return "model"

    def hf_name(self, name: str) -> str | None:
        """Return Hugging Face's name of a parameter, with the layers below `hf_body`."""
        theirs = self.layout.to_hf(name)
        if theirs is None or not theirs.startswith("model."):
            return theirs
        return f"{self.hf_body}.{theirs.removeprefix('model.')}"

    def hf_parts(self, name: str, shape: Shape, stored: Container[str] = ()) -> list[Part]:
        """Return the tensors in which Hugging Face stores a parameter; see `Layout.hf_parts`."""
        return self.layout.hf_parts(name, shape, stored)

    def unsupported_length(self, seq_len: int) -> str:
        """Return why the model does not compute rows of so many tokens; empty: it does."""
        return ""

    def hf_further_blocks(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return what names in a folder begin with of blocks that this model does without."""
        return ()

    def require_hf(self) -> None:
        """Raise a ValueError of what the Hugging Face models of the family cannot be."""

    @property
    def normalises_heads(self) -> bool:
        """Whether queries and keys have norms, which bound the scores of attention."""
        return False

    def attention_rows(self) -> dict[str, HeadRows]:
        """Return how the rows of a block's attention belong to heads, by the name of a module."""
        return {}

    def describe_block(self, number: int) -> tuple[object, ...]:
        """Return what tells block `number` from blocks of another kind; by default, nothing."""
        return ()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every parameter, in the module's order.

        The vocabulary is settled. Empty where a family does not say: what depends on it is then
        known only once the module is built.
        """
        return {}

    def with_vocab(self, vocab_size: int) -> Self:
        """Return the config with its vocabulary size settled.

        A config that leaves it open takes the tokenizer's, rounded up to a multiple of 64. A model
        without a vocabulary keeps its config.
        """
        return self

    @classmethod
    def flatten_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json as transformers' model of this family understands it."""
        return flatten_settings(settings)

    @classmethod
    def sizes_from_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of `[model]` that config.json says.

        Raises:
            SettingsError: a size is missing, or the family cannot compute what is asked for.
        """
        name = cls.model_fields["name"].default
        sizes = read_sizes(cls.flatten_hf(settings), name, cls.layout)
        if "attention" in cls.model_fields and settings.get("is_causal") is False:
            sizes["attention"] = "bidirectional"
        return sizes

    @classmethod
    def from_hf_config(cls, settings: Mapping[str, Any]) -> Self:
        """Return the config of a model that Hugging Face's config.json describes.

        Raises:
            SettingsError: all that is missing, impossible, or not done by this family.
        """
        config = validate(cls, cls.sizes_from_hf(settings), settings)
        there, here = cls.flatten_hf(settings), config.hf_config()
        if problems := find_mismatches(there, here, config.name, cls.layout):
            raise SettingsError(problems)
        return cast("Self", config)

    def hf_config(self) -> dict[str, Any]:
        """Return what Hugging Face's config.json says of this model; empty if it has no name there.

        `Layout.hf_keys` and `Layout.hf_possible` say which of it must agree when weights are read.
        """
        return {}

    def build(self, kernels: Kernels) -> Model:
        """Return the module on the current default device (`meta` while a run is assembled)."""
        raise NotImplementedError

    def flops_per_token(self, seq_len: int) -> float:
        """Return floating-point operations a token of one training step (forward and backward).

        Six a weight that multiplies, and causal attention counted at half (PaLM, arXiv:2204.02311,
        appendix B). By default every weight of `parameter_shapes` counts; 0: not known.
        """
        return 6.0 * sum(math.prod(shape) for shape in self.parameter_shapes().values())
