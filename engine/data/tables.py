"""The `[data]` table."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..core.config import Count, CountOrZero, LocalPath, Table
from ..core.registry import Named
from ..sources import configs


class Data(Table):
    """What is trained on, and how it becomes batches."""

    seq_len: Annotated[int, Field(ge=1, le=2**24)] = 256
    """tokens a row"""
    global_batch: Annotated[int, Field(ge=1, le=2**31)] = 16
    """sequences an optimizer step, over all ranks"""
    micro_batch: Annotated[int, Field(ge=1, le=2**31)] = 8
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
    sources: Annotated[
        list[Annotated[configs.SourceConfig, Named(configs.sources)]],
        Field(min_length=1, max_length=1000, validate_default=True),
    ] = [{"name": "python"}]  # type: ignore[list-item] # validated as any other
    """where the documents come from; more than one: a mixture by weight"""

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
