"""The `[data]` table."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ..core.config import Count, CountOrZero, LocalPath, SplitName, Table
from ..core.registry import Named
from ..sources import configs

Sources = list[Annotated[configs.SourceConfig, Named(configs.sources)]]
Length = Annotated[int, Field(ge=1, le=2**24)]
Rows = Annotated[int, Field(ge=1, le=2**31)]


class TrainingSplit(Table):
    """A part of the training that has sources, and if wanted sizes, of its own."""

    name: SplitName
    """what metrics and messages call it"""
    sources: Annotated[Sources, Field(min_length=1, max_length=1000)]
    """where the documents come from; more than one: a mixture by weight"""
    steps: Count | None = None
    """optimizer steps of a turn; default: one pass over the samples, in whole batches"""
    seq_len: Length | None = None
    """tokens a row; default: data.seq_len"""
    global_batch: Rows | None = None
    """sequences an optimizer step, over all ranks; default: data.global_batch"""
    micro_batch: Rows | None = None
    """sequences a forward pass, on each data rank; default: data.micro_batch"""

    @property
    def settings(self) -> dict[str, Any]:
        """What the split puts in place of the keys of `[data]`; each source has a label."""
        sizes = self.model_dump(exclude={"name", "steps", "sources"}, exclude_none=True)
        named = [
            each.model_copy(update={"label": each.label or f"{self.name}.{index}.{each.name}"})
            for index, each in enumerate(self.sources)
        ]
        return {"sources": named, **sizes}


class Data(Table):
    """What is trained on, and how it becomes batches."""

    seq_len: Length = 256
    """tokens a row"""
    global_batch: Rows = 16
    """sequences an optimizer step, over all ranks"""
    micro_batch: Rows = 8
    """sequences a forward pass, on each data rank; the rest becomes accumulation"""
    packing: Literal["concat", "documents", "none", "ragged"] = "concat"
    """"concat": the token stream cut into rows; "documents": rows of whole documents, attention and
    loss masked at their borders; "none": one document a row, padded; "ragged": the same without
    padding, rows of unequal lengths one after the other"""
    on_long: Literal["error", "truncate", "drop"] = "error"
    """a sample of more than `seq_len` tokens: "error" names file and line; "truncate" cuts it,
    "drop" leaves it out, and both count them; language modelling cuts documents into rows"""
    pad_to: CountOrZero = 0
    """samples of a step are padded to the longest of them, rounded up to a multiple of this; 0: to
    `seq_len`, so that all steps have one shape; language modelling fills its rows"""
    shuffle: bool = True
    """visit the rows in a random order, another one each epoch"""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """processes that read ahead; 0 reads in the training process"""
    worker_timeout_seconds: Count = 300
    """how long a batch from a worker may take"""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """share of each training source held out for validation when no source has that split"""
    cache_dir: LocalPath = ""
    """where tokenised sources are kept; default: the user's cache folder"""
    sources: Annotated[Sources, Field(min_length=1, max_length=1000, validate_default=True)] = [
        {"name": "python"}  # type: ignore[list-item] # validated as any other
    ]
    """where the documents come from; more than one: a mixture by weight"""
    splits: Annotated[list[TrainingSplit], Field(max_length=100)] = []
    """in place of sources: splits that are trained in turn, each with sources of its own"""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_sources(cls, values: Any) -> Any:
        """Let a table with splits have no sources: so it is written, and so an extended recipe's
        are taken back.
        """
        if isinstance(values, dict) and values.get("splits") and values.get("sources") == []:
            return {key: value for key, value in values.items() if key != "sources"}
        return values

    @model_validator(mode="after")
    def _leave_out_default_sources(self) -> Self:
        if self.splits and "sources" not in self.model_fields_set:
            # In place: an "after" validator of pydantic must return the object that it was given.
            self.__dict__["sources"] = []
        return self

    @property
    def padded(self) -> Data:
        """The table for the same rows, each padded to one length where they are ragged."""
        return self.model_copy(update={"packing": "none"}) if self.packing == "ragged" else self

    @property
    def labels(self) -> list[str]:
        """What metrics call each source."""
        return [
            source.label or f"{index}.{source.name}" for index, source in enumerate(self.sources)
        ]

    @property
    def all_sources(self) -> list[configs.SourceConfig]:
        """The sources of all splits."""
        return [source for table in self.tables for source in table.sources]

    @property
    def tables(self) -> list[Data]:
        """The table of each training split, as if it were trained on alone."""
        if not self.splits:
            return [self]
        sources = [source for split in self.splits for source in split.sources]
        held_out = any(source.split == "validation" for source in sources)
        fraction = 0.0 if held_out else self.validation_fraction
        return [
            self.model_copy(
                update={"splits": [], "validation_fraction": fraction, **split.settings}
            )
            for split in self.splits
        ]

    @property
    def largest(self) -> Data:
        """The table of the split whose micro batches have most tokens, and of these the longest."""
        sizes = {
            (each.seq_len * min(each.micro_batch, each.global_batch), each.seq_len): each
            for each in self.tables
        }
        return sizes[max(sizes)]
