"""Scalars and histograms for TensorBoard, by its own event writer, which imports no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..core.errors import EnvironmentFault
from ..core.extras import install_command
from .feed import extract_histograms, extract_scalars

FLUSH_SECONDS = 1
"""seconds between writes to disk: a kill loses the rows since the last one"""


class TensorBoardTracker:
    """Writes each number of a row as a scalar, and each histogram as one.

    Args:
        folder: folder of the event files; each attempt adds one.
        resume_step: the step after which the run resumes. TensorBoard drops later rows of earlier
            attempts when it reads the restart mark (tensorboard: event_accumulator,
            purge_orphaned_data).

    Raises:
        EnvironmentFault: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise EnvironmentFault(
                f"metrics.tensorboard needs a package that is missing: {error}",
                install_command("tensorboard"),
            ) from error
        self._event = event_pb2.Event
        self._summary, self._histogram = summary_pb2.Summary, summary_pb2.HistogramProto
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        # TensorBoard would show the steps of two attempts in one curve without it.
        mark = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        # A run that starts over repeats the evaluation before its first step: purge step 0 as well.
        first = resume_step + 1 if resume_step else 0
        self._writer.add_event(self._event(step=first, wall_time=time.time(), session_log=mark))

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the row's numbers and histograms."""
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in extract_scalars(row).items()
        ]
        histograms = [
            self._summary.Value(tag=name, histo=self._make_histogram(counts, edges))
            for name, (counts, edges) in extract_histograms(row).items()
        ]
        summary = self._summary(value=scalars + histograms)
        self._writer.add_event(
            self._event(step=row["step"], wall_time=row["time"], summary=summary)
        )

    def _make_histogram(self, counts: Sequence[int], edges: Sequence[float]) -> Any:
        # The sums are of the middles of the bins; TensorBoard draws limits and counts alone.
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        pairs = list(zip(counts, middles, strict=True))
        return self._histogram(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(count * middle for count, middle in pairs),
            sum_squares=sum(count * middle**2 for count, middle in pairs),
            bucket_limit=edges[1:],
            bucket=counts,
        )

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
