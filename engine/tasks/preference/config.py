"""The tables of preferences and of rewards. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ....model_zoo.heads import HeadSettings
from ...core.config import LocalPath
from ..classification.config import HeadTask
from ..precomputed import PrecomputedOutputs
from ..tables import LossConfig, TaskConfig, TaskData, TaskSettings
from .losses import PreferenceLoss

if TYPE_CHECKING:
    from ....model_zoo.config import ModelConfig
    from ...corpus.records.encode_records import RecordEncoding
    from ...data.collate import Collation
    from ...data.dataset import OpenedData
    from ...tokenizers.tokenizer import Tokenizer
    from ..task import Task


class Preference(TaskConfig):
    """Prefer the better of two answers to a prompt; fields prompt, chosen and rejected."""

    losses: ClassVar[tuple[str, ...]] = ("dpo", "ipo", "orpo", "simpo", "kto")
    packings: ClassVar[tuple[str, ...]] = ("none", "ragged")
    attention: ClassVar[tuple[str, ...]] = ("causal",)
    fields: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")
    rows_per_sample: ClassVar[int] = 2
    scores: ClassVar[Mapping[str, bool]] = {"loss": False, "accuracy": True}
    frozen_key: ClassVar[str] = "reference"

    name: Literal["preference"] = "preference"
    reference: str = ""
    """a run, one of its checkpoints, or a Hugging Face folder, which answers are compared with;
    empty: the weights that training starts from, or with LoRA the model without adapters"""

    precomputed: LocalPath = ""
    """folder of the reference's log-probabilities, which `trainer precompute` writes: the reference
    itself is then not opened"""

    def adapt_model(self, config: ModelConfig) -> ModelConfig:
        """Return the model without training of further predictions: criteria are of answers."""
        return config.freeze_predictions()

    def frozen_model(self, loss: LossConfig) -> str | None:
        """Return the place of the reference; None for a loss without one, or with `precomputed`."""
        needs = isinstance(loss, PreferenceLoss) and loss.uses_reference
        return self.reference if needs and not self.precomputed else None

    def find_outputs(self, loss: LossConfig) -> PrecomputedOutputs | None:
        """Return the reference's log-probabilities on disk."""
        return PrecomputedOutputs(self.precomputed, {}) if self.precomputed else None

    def build_data(self, data: TaskData) -> OpenedData:
        """Open, or encode once, every source, and hold records out for validation."""
        from ...data.records import RecordOpener

        collation = self.build_collation(data.tokenizer, data.loss, data.table.packing == "ragged")
        encoding = self.build_encoding(data.tokenizer)
        opener = RecordOpener(data.table, data.tokenizer, collation, encoding, data.share)
        return opener.open_data(data.seed)

    def build_encoding(self, tokenizer: Tokenizer, *, is_labelled: bool = True) -> RecordEncoding:
        """Return the encoding of pairs of answers."""
        from ..encode_answers import make_preference_encoding

        return make_preference_encoding(tokenizer)

    def build_single_encoding(self, tokenizer: Tokenizer) -> RecordEncoding:
        """Return the encoding of records with one answer."""
        from ..encode_answers import make_answer_encoding

        return make_answer_encoding(tokenizer)

    def build_collation(
        self, tokenizer: Tokenizer, loss: LossConfig | None, ragged: bool = False
    ) -> Collation:
        """Return how pairs become batches."""
        from .batch import make_collation

        mismatches = isinstance(loss, PreferenceLoss) and loss.uses_mismatches
        return make_collation(tokenizer.eos_id, with_mismatches=mismatches, ragged=ragged)

    def build(self, settings: TaskSettings) -> Task[Any]:
        """Return preferences."""
        from .pairs import Pairs

        criterion = settings.loss.build(settings.kernels)
        return Pairs(
            loss=criterion, score=criterion.score, data=settings.data, frozen=settings.frozen
        )


class Reward(HeadTask):
    """Score answers to a prompt by one number; fields prompt, chosen and rejected."""

    losses: ClassVar[tuple[str, ...]] = ("bradley_terry",)
    fields: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")
    rows_per_sample: ClassVar[int] = 2
    scores: ClassVar[Mapping[str, bool]] = {"loss": False, "accuracy": True}

    name: Literal["reward"] = "reward"

    def head(self) -> HeadSettings:
        """Return one output for each text, as transformers' reward models have it."""
        return HeadSettings(kind="sequence_classification", outputs=1, dropout=self.dropout)

    def build_encoding(self, tokenizer: Tokenizer, *, is_labelled: bool = True) -> RecordEncoding:
        """Return the encoding of pairs of answers."""
        return Preference().build_encoding(tokenizer)

    def build_single_encoding(self, tokenizer: Tokenizer) -> RecordEncoding:
        """Return the encoding of records with one answer."""
        return Preference().build_single_encoding(tokenizer)

    def build_collation(
        self, tokenizer: Tokenizer, loss: LossConfig | None, ragged: bool = False
    ) -> Collation:
        """Return how pairs become batches."""
        return Preference().build_collation(tokenizer, loss, ragged)

    def build(self, settings: TaskSettings) -> Task[Any]:
        """Return rewards."""
        from .criteria import bradley_terry
        from .rewards import Rewards

        criterion = settings.loss.build(settings.kernels)
        return Rewards(loss=criterion, score=bradley_terry, data=settings.data)
