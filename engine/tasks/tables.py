"""The recipe's `[task]` and `[loss]` tables, and the registries of tasks and losses. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..core.config import Component
from ..core.errors import RecipeError
from ..core.registry import Registry
from .metrics.tables import Kind, Outputs

if TYPE_CHECKING:
    from ...kernels.choose import Kernels
    from ...model_zoo.config import ModelConfig
    from ..corpus.checksums import Share
    from ..corpus.records.encode_records import RecordEncoding
    from ..corpus.store import Divide
    from ..data.collate import Collation
    from ..data.dataset import OpenedData
    from ..data.tables import Data
    from ..tokenizers.tokenizer import Tokenizer
    from .criteria import ClassCrossEntropy, Criterion
    from .frozen import FrozenModel
    from .precomputed import PrecomputedOutputs
    from .task import Task


class LossConfig(Component):
    """Base of every loss's table.

    A loss is the criterion of a task. One for language modelling overrides `build`, one of the
    outputs of a model and the fields of a batch overrides `build_criterion`.
    """

    tasks: ClassVar[tuple[str, ...]] = ("language_modeling",)
    """the tasks that accept the loss although they do not name it, such as a plugin's loss"""
    outputs: ClassVar[Kind | None] = None
    """what the outputs of a model are to the loss, for metrics; None: nothing that they measure"""

    def build(self, kernels: Kernels) -> Any:
        """Return the function from hidden states, head weight and labels to the summed loss."""
        raise NotImplementedError

    def build_criterion(self) -> Criterion:
        """Return the criterion of outputs and fields."""
        raise NotImplementedError

    def mismatches(self, task: str) -> Iterator[tuple[str, str]]:
        """Yield each key that has no meaning for a task, and why."""
        yield from ()


losses: Registry[LossConfig] = Registry(
    "loss",
    default="cross_entropy",
    built_in={
        "bce": "engine.tasks.losses:BinaryCrossEntropy",
        "mse": "engine.tasks.losses:MeanSquaredError",
        "l1": "engine.tasks.losses:MeanAbsoluteError",
        "huber": "engine.tasks.losses:Huber",
        "ctc": "engine.tasks.losses:CTC",
        "dpo": "engine.tasks.preference.losses:DPO",
        "ipo": "engine.tasks.preference.losses:IPO",
        "orpo": "engine.tasks.preference.losses:ORPO",
        "simpo": "engine.tasks.preference.losses:SimPO",
        "kto": "engine.tasks.preference.losses:KTO",
        "bradley_terry": "engine.tasks.preference.losses:BradleyTerry",
        "forward_kl": "engine.tasks.distillation.losses:ForwardKL",
        "reverse_kl": "engine.tasks.distillation.losses:ReverseKL",
        "jensen_shannon": "engine.tasks.distillation.losses:JensenShannon",
    },
)


@losses.register
class CrossEntropy(LossConfig):
    """Cross entropy of tokens or classes; logits of all tokens are never held at once."""

    tasks: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[Kind | None] = "multiclass"

    name: Literal["cross_entropy"] = "cross_entropy"
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """of tokens: weight of the squared log-partition (PaLM, arXiv:2204.02311, section 5)"""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """of classes: share of the target that is spread over all classes (arXiv:1512.00567)"""
    class_weights: list[Annotated[float, Field(ge=0)]] = []
    """of classes: the weight of each, in their order; the mean is then over weights"""

    def build(self, kernels: Kernels) -> Any:
        """Return the chunked linear cross entropy of tokens."""
        from functools import partial

        return partial(kernels.linear_cross_entropy, z_loss=self.z_loss)

    def build_criterion(self) -> ClassCrossEntropy:
        """Return the cross entropy of classes."""
        from .criteria import ClassCrossEntropy

        return ClassCrossEntropy(self.label_smoothing, tuple(self.class_weights))

    def mismatches(self, task: str) -> Iterator[tuple[str, str]]:
        """Yield the keys of classes where tokens are predicted, and the other way round."""
        predicts_tokens = task in ("language_modeling", "masked_language_modeling")
        given = {
            "z_loss": not predicts_tokens and self.z_loss,
            "label_smoothing": predicts_tokens and self.label_smoothing,
            "class_weights": predicts_tokens and self.class_weights,
        }
        yield from ((key, f'the task "{task}" has no {key}') for key in given if given[key])


@dataclass(frozen=True)
class TaskData:
    """What a task opens its data with.

    Attributes:
        table: the recipe's `[data]`.
        tokenizer: the tokenizer of the recipe.
        seed: the seed of the order of samples.
        run: the run's directory; streams are tokenised for it alone. Empty: nothing is trained.
        share: the processes that divide the comparison of files with their checksums.
        loss: the recipe's `[loss]`; None: nothing is trained.
        longest: tokens of the longest row of all training splits; 0: there are no others.
        divide: selects the documents that are trained on; None: all are.
    """

    table: Data
    tokenizer: Tokenizer
    seed: int
    run: str
    share: Share
    loss: LossConfig | None = None
    longest: int = 0
    divide: Divide | None = None


@dataclass(frozen=True)
class TaskSettings:
    """What a task is built from.

    Attributes:
        loss: the recipe's `[loss]`.
        kernels: the implementations of this rank.
        data: the recipe's `[data]`.
        model: the model's config, with the vocabulary settled.
        tokenizer: the tokenizer of the recipe; None where nothing is trained.
        sources: what metrics call the sources whose losses are reported apart.
        frozen: the model that `TaskConfig.frozen_model` names; None: there is none.
    """

    loss: LossConfig
    kernels: Kernels
    data: Data
    model: ModelConfig
    tokenizer: Tokenizer | None = None
    sources: Sequence[str] = ()
    frozen: FrozenModel | None = None


class TaskConfig(Component):
    """Base of every task's table: what is learned, and what the task needs of the rest."""

    losses: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    """names of the losses that the task accepts; the first one is its default"""
    packings: ClassVar[tuple[str, ...]] = ("none",)
    """values of `data.packing` that the task supports; the first one is its default"""
    axes: ClassVar[tuple[str, ...]] = ("context", "tensor", "pipeline", "expert", "expert_tensor")
    """axes of `[parallel]`, beside the data axes, that the task supports"""
    unit: ClassVar[Literal["tokens", "samples"]] = "samples"
    """what the task counts: the loss is a mean over it, and rates are told in it"""
    fields: ClassVar[tuple[str, ...]] = ()
    """fields of the records that the task reads; empty: it reads documents, or a plugin's data"""
    needs_language_model: ClassVar[bool] = True
    """whether the model is a language model of the zoo; else it is a module of a plugin"""
    attention: ClassVar[tuple[str, ...]] = ("causal", "bidirectional")
    """values of `model.attention` that the task supports"""
    rows_per_sample: ClassVar[int] = 1
    """sequences that the model computes for a sample"""
    scores: ClassVar[Mapping[str, bool]] = {"loss": False}
    """numbers of an evaluation that `evaluate.metric` can name; whether higher ones are better"""
    frozen_key: ClassVar[str] = ""
    """the key of the table that names a frozen model"""
    needs_frozen: ClassVar[bool] = False
    """whether that key has to name one; else training's own start is the default"""
    scores_texts: ClassVar[bool] = False
    """whether the model gives each token of any text a probability, so that texts are scored"""

    @classmethod
    def default_loss(cls, table: Mapping[str, Any]) -> str:  # noqa: ARG003 # overrides read it
        """Return the loss of a recipe that names none; `table` is `[task]` as it was written."""
        return cls.losses[0]

    def accepts(self, loss: LossConfig) -> bool:
        """Return whether the task can be trained with a loss."""
        return loss.name in self.accepted_losses or self.name in loss.tasks

    @property
    def accepted_losses(self) -> tuple[str, ...]:
        """The names of the losses that the task can be trained with, as its keys are set."""
        return self.losses

    def outputs(self, loss: LossConfig) -> Outputs | None:
        """Return what metrics can measure of the task; None: nothing."""
        return None

    def frozen_model(self, loss: LossConfig) -> str | None:
        """Return where the frozen model is that the task learns from; None: there is none.

        An empty text stands for the weights that training starts from, or, of a model with
        adapters, for the model without them.
        """
        return None

    def find_outputs(self, loss: LossConfig) -> PrecomputedOutputs | None:
        """Return the outputs on disk that take the place of the frozen model; None: none do."""
        return None

    def positions(self, data: Data) -> int:
        """Return for how many positions `flops_per_token` counts a sample; 1: all of it."""
        return self.rows_per_sample * data.seq_len if self.needs_language_model else 1

    @property
    def extra_tokens(self) -> int:
        """Tokens that the model embeds beside those of the tokenizer."""
        return 0

    def adapt_model(self, config: ModelConfig) -> ModelConfig:
        """Return the config of the model with the head that the task trains."""
        return config

    def build_data(self, data: TaskData) -> OpenedData:
        """Open the data of the recipe and return its samples.

        Raises:
            DataError: a source cannot be read, is damaged, or is too short for one row.
        """
        raise NotImplementedError

    def build(self, settings: TaskSettings) -> Task[Any]:
        """Return what the training step calls."""
        raise NotImplementedError

    def build_encoding(self, tokenizer: Tokenizer, *, is_labelled: bool = True) -> RecordEncoding:
        """Return how records become arrays, outside of training.

        Args:
            tokenizer: the tokenizer.
            is_labelled: False for records whose labels are to be predicted.

        Raises:
            RecipeError: the task reads no records.
        """
        hint = "" if self.needs_language_model else "name a data set of a plugin with --source"
        raise RecipeError(f'the task "{self.name}" reads no records', hint)

    def build_single_encoding(self, tokenizer: Tokenizer) -> RecordEncoding | None:
        """Return how records with one thing to score become arrays; None: there are no such."""
        return None

    def build_collation(self, tokenizer: Tokenizer, loss: LossConfig | None) -> Collation:
        """Return how samples become batches, outside of training.

        Raises:
            RecipeError: the task has no batches of samples.
        """
        raise RecipeError(f'the task "{self.name}" predicts nothing of single samples')

    def build_prediction(
        self, prediction: Mapping[str, Any], values: Mapping[str, Any], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Return what a user reads, from what `Task.predict` returned for a sample.

        Args:
            prediction: of the sample.
            values: the fields of the record; empty for a sample of a data set.
            tokenizer: the tokenizer.
        """
        return dict(prediction)


tasks: Registry[TaskConfig] = Registry(
    "task",
    default="language_modeling",
    built_in={
        "language_modeling": "engine.tasks.language_modeling.config:LanguageModeling",
        "sequence_classification": "engine.tasks.classification.config:SequenceClassification",
        "token_classification": "engine.tasks.classification.config:TokenClassification",
        "question_answering": "engine.tasks.classification.config:QuestionAnswering",
        "preference": "engine.tasks.preference.config:Preference",
        "reward": "engine.tasks.preference.config:Reward",
        "distillation": "engine.tasks.distillation.config:Distillation",
        "masked_language_modeling": "engine.tasks.language_modeling.config:MaskedLanguageModeling",
        "supervised": "engine.tasks.supervised.config:Supervised",
    },
)
