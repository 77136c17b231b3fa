"""The table of language modelling. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...core.errors import RecipeError
from ...core.softcaps import check_softcap
from ..metrics.tables import Outputs
from ..tables import LossConfig, TaskConfig, TaskData, TaskSettings

if TYPE_CHECKING:
    from ...corpus.records.encode_records import RecordEncoding
    from ...data.collate import Collation
    from ...data.dataset import OpenedData
    from ...tokenizers.tokenizer import Tokenizer
    from ..task import Task


class LanguageModeling(TaskConfig):
    """Predict the next token of documents."""

    losses: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    packings: ClassVar[tuple[str, ...]] = ("concat", "documents", "none", "ragged")
    unit: ClassVar[Literal["tokens", "samples"]] = "tokens"
    attention: ClassVar[tuple[str, ...]] = ("causal",)
    scores: ClassVar[Mapping[str, bool]] = {"loss": False, "perplexity": False}
    scores_texts: ClassVar[bool] = True

    name: Literal["language_modeling"] = "language_modeling"

    def outputs(self, loss: LossConfig) -> Outputs | None:
        """Return the tokens, as classes without their logits."""
        return Outputs("multiclass", has_scores=False)

    def build_data(self, data: TaskData) -> OpenedData:
        """Open, or tokenise once, every source, and split and pack them."""
        from ...data.dataset import open_data

        table, run, share = data.table, data.run, data.share
        return open_data(table, data.tokenizer, data.seed, run, share, data.longest, data.divide)

    def build_encoding(self, tokenizer: Tokenizer, *, is_labelled: bool = True) -> RecordEncoding:
        """Return the encoding of texts that are scored whole."""
        from .scored_texts import make_text_encoding

        return make_text_encoding(tokenizer)

    def build_collation(self, tokenizer: Tokenizer, loss: LossConfig | None) -> Collation:
        """Return how texts that are scored become rows."""
        from .scored_texts import make_text_collation

        return make_text_collation(tokenizer.eos_id)

    def build(self, settings: TaskSettings) -> Task[Any]:
        """Return next-token prediction."""
        from .next_token import NextToken, find_token_bytes

        loss = settings.loss.build(settings.kernels)
        if getattr(settings.model, "head_softcap", None) is not None and (
            problems := check_softcap(loss, "logits", "loss.name", settings.loss.name)
        ):
            raise RecipeError(problems)
        return NextToken(
            loss=loss,
            sources=tuple(settings.sources),
            data=settings.data,
            token_bytes=find_token_bytes(settings.tokenizer),
            vocabulary=settings.kernels.vocabulary,
        )


class MaskedLanguageModeling(LanguageModeling):
    """Tell tokens that are hidden, from those before and after (model.attention = "bidirectional").

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.
    """

    attention: ClassVar[tuple[str, ...]] = ("bidirectional",)
    scores_texts: ClassVar[bool] = False

    name: Literal["masked_language_modeling"] = "masked_language_modeling"  # type: ignore[assignment] # another component
    mask_rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """share of the tokens that are to be told: 80 % of them are hidden, 10 % become a random token,
    and 10 % stay"""
    mask_token: str = ""
    """text of the token that stands for a hidden one; default: the first number that no token of
    the tokenizer has"""

    @property
    def extra_tokens(self) -> int:
        """A number for the mask, unless the tokenizer has a token for it."""
        return 0 if self.mask_token else 1

    def build_data(self, data: TaskData) -> OpenedData:
        """Open the documents, and hide tokens of each row."""
        from dataclasses import replace

        from .masked import MaskedSamples, Masking, find_mask_id

        opened = super().build_data(data)
        mask_id = find_mask_id(data.tokenizer, self.mask_token)
        masking = Masking(self.mask_rate, mask_id, data.tokenizer.vocab_size, data.seed)
        held_out = opened.validation
        return replace(
            opened,
            train=MaskedSamples(opened.train, masking),  # type: ignore[arg-type] # rows of tokens
            validation=MaskedSamples(held_out, masking) if held_out else None,  # type: ignore[arg-type]
        )

    def build_collation(self, tokenizer: Tokenizer, loss: LossConfig | None) -> Collation:
        """Refuse: which tokens are to be told, and which are there, no record says."""
        return TaskConfig.build_collation(self, tokenizer, loss)

    def build(self, settings: TaskSettings) -> Task[Any]:
        """Return the prediction of hidden tokens, of which bits per byte say nothing."""
        from dataclasses import replace

        return replace(super().build(settings), token_bytes=None)  # type: ignore[call-arg] # next tokens'
