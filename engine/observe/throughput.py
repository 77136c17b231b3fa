"""How fast a run is, how much of the hardware it uses, and which rank slows it down."""

from __future__ import annotations

import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..core.heartbeat import heartbeat

Item = TypeVar("Item")


@dataclass(frozen=True)
class PeakFlops:
    """Dense matrix peaks of one device in TFLOP/s."""

    half: float
    """bf16 and fp16, summed in fp32"""
    single: float
    """fp32 without TF32"""
    has_bf16: bool = True


# Device name patterns, first match wins. Vendors' data sheets; where they print the rate with
# structured sparsity, half of it. GeForce cards: white papers, the rate with fp32 accumulation.
_PEAKS: tuple[tuple[str, PeakFlops], ...] = (
    # NVIDIA Blackwell: HGX B200/B300 and GB200/GB300 NVL72 data sheets (per GPU)
    (r"\bGB[23]00\b", PeakFlops(2500.0, 80.0)),
    (r"\bB[23]00\b", PeakFlops(2250.0, 75.0)),
    # NVIDIA Hopper: H100, H200, GH200 data sheets; H20 and H800 are the export variants
    (r"\bH200 NVL\b", PeakFlops(835.5, 60.0)),
    (r"\bH100 NVL\b", PeakFlops(835.5, 60.0)),
    (r"\bH[18]00 PCIe\b", PeakFlops(756.0, 51.0)),
    (r"\b(H100|H200|H800|GH200)\b", PeakFlops(989.4, 67.0)),
    (r"\bH20\b", PeakFlops(148.0, 44.0)),
    # NVIDIA Ampere and Ada: A100, A30, A40, A10, L4, L40, L40S data sheets
    (r"\bA[18]00\b", PeakFlops(312.0, 19.5)),
    (r"\bA30\b", PeakFlops(165.0, 10.3)),
    (r"\bA40\b", PeakFlops(149.7, 37.4)),
    (r"\bA10G\b", PeakFlops(70.0, 31.5)),
    (r"\bA10\b", PeakFlops(125.0, 31.2)),
    (r"\bL40S\b", PeakFlops(362.0, 91.6)),
    (r"\bL40\b", PeakFlops(181.0, 90.5)),
    (r"\bL4\b", PeakFlops(121.0, 30.3)),
    (r"\bRTX 6000 Ada\b", PeakFlops(364.2, 91.1)),
    (r"\bRTX A6000\b", PeakFlops(154.8, 38.7)),
    # NVIDIA GeForce: Ampere GA102, Ada and RTX Blackwell architecture white papers
    (r"\bRTX 5090\b(?! (D|Laptop))", PeakFlops(209.5, 104.8)),
    (r"\bRTX 4090\b(?! (D|Laptop))", PeakFlops(165.2, 82.6)),
    (r"\bRTX 3090\b(?! (Ti|Laptop))", PeakFlops(71.0, 35.6)),
    # NVIDIA Volta and Turing: V100 and T4 data sheets
    (r"\bV100-SXM", PeakFlops(125.0, 15.7, has_bf16=False)),
    (r"\bV100-PCIE", PeakFlops(112.0, 14.0, has_bf16=False)),
    (r"\bT4\b", PeakFlops(65.0, 8.1, has_bf16=False)),
    # AMD Instinct data sheets, matrix cores; MI250 and MI250X show each die as a device
    (r"\bMI355X\b", PeakFlops(2516.6, 157.3)),
    (r"\bMI350X\b", PeakFlops(2306.9, 144.2)),
    (r"\bMI3(00|25)X\b", PeakFlops(1307.4, 163.4)),
    (r"\bMI250X\b", PeakFlops(191.5, 47.9)),
    (r"\bMI250\b", PeakFlops(181.0, 45.3)),
    (r"\bMI210\b", PeakFlops(181.0, 45.3)),
)


def peak_flops(device_name: str, compute: str) -> float | None:
    """Return the dense peak of a device in FLOP/s; None if it is unknown, or for a GPU's slice.

    Args:
        device_name: the name that `torch.cuda.get_device_name` returns.
        compute: "bf16", "fp16" or "fp32" (without TF32).
    """
    # The name tells the whole GPU, of which a slice has a part that it does not tell.
    if re.search(r"\b(MIG|GRID)\b", device_name):
        return None
    peak = next((peak for pattern, peak in _PEAKS if re.search(pattern, device_name)), None)
    if peak is None or (compute == "bf16" and not peak.has_bf16):
        return None
    return (peak.single if compute == "fp32" else peak.half) * 1e12


def device_peak_flops(device: torch.device, compute: str) -> float | None:
    """Return the dense peak of a torch device in FLOP/s; None for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), compute)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory since the start of the process.

    For a GPU the memory that its allocator has given out, for a CPU the resident memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_peak_bytes()


def resident_peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    try:
        # getrusage would count the process that started this one (its value survives exec).
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Throughput:
    """Measures rates and step times, without the time spent in `exclude_time`.

    Args:
        unit: what the task counts, "tokens" or "samples".
        describe_position: returns what rows say of so many global batches, such as `samples`.
        flops_per_unit: returns the operations of training for each unit, in the last of so many
            global batches.
        peak_flops: dense peak of all devices of the run together, None if unknown.
        clock: returns the time in seconds.
        row_flops: returns the operations since the last reading, where rows have unequal lengths;
            None: units tell them.
    """

    def __init__(
        self,
        unit: str,
        describe_position: Callable[[int], dict[str, Any]],
        flops_per_unit: Callable[[int], float],
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
        row_flops: Callable[[], float] | None = None,
    ) -> None:
        self._unit = unit
        self._describe_position = describe_position
        self._flops_per_unit = flops_per_unit
        self._peak_flops = peak_flops
        self._clock = clock
        self._row_flops = row_flops
        self.start(0, 0)

    def start(self, step: int, count: int) -> None:
        """Begin to measure after `step` steps and `count` units."""
        self._step = step
        self._count = count
        self._waited = 0.0
        self._started = self._clock()
        if self._row_flops:
            self._row_flops()  # those of steps that a rollback undid are forgotten

    def name_counts(self, count: int, batches: int) -> dict[str, Any]:
        """Return how much was trained on, by the name that rows have for it.

        Args:
            count: units of the task.
            batches: global batches.
        """
        counts = {} if self._unit == "samples" else {self._unit: count}
        return {**counts, **self._describe_position(batches)}

    def read(self, step: int, count: int, batches: int) -> dict[str, float | None]:
        """Return the means over the steps since the last call.

        Args:
            step: finished optimizer steps.
            count: units trained on so far, over all ranks.
            batches: global batches that were read so far.

        Returns:
            the units per second, `step_seconds`, the part of it that was waited for data
            (`data_seconds`), and `mfu`: model FLOP/s utilization, 0 to 1 (PaLM, arXiv:2204.02311,
            appendix B), None on devices whose peak is unknown.
        """
        seconds = max(self._clock() - self._started, 1e-9)
        steps = max(step - self._step, 1)
        per_second = (count - self._count) / seconds
        flops = 0.0
        if self._row_flops:
            flops = self._row_flops() / seconds
        elif self._peak_flops:
            flops = self._flops_per_unit(batches) * per_second
        rates = {
            f"{self._unit}_per_second": per_second,
            "step_seconds": seconds / steps,
            "data_seconds": self._waited / steps,
            "mfu": flops / self._peak_flops if self._peak_flops else None,
        }
        self.start(step, count)
        return rates

    @contextmanager
    def exclude_time(self) -> Iterator[None]:
        """Leave out the time of the context, such as an evaluation or a synchronous save."""
        paused_at = self._clock()
        try:
            yield
        finally:
            self._started += self._clock() - paused_at

    def measure_waits(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the items, and measure how long each was waited for."""
        while True:
            asked_at = self._clock()
            try:
                item = next(items)
            except StopIteration:
                return
            self._waited += self._clock() - asked_at
            yield item


LOCAL_PHASES = ("data", "optimizer")
"""phases without a collective under any plan"""
SLOW_RATIO = 1.5
SLOW_SHARE = 0.05
ROWS_IN_A_ROW = 3


class SlowRanks:
    """Compares the time of a step that each rank spends by itself, outside collectives.

    The step time is the same on all ranks, because each waits for the slowest. The time before that
    wait differs: waiting for data, the optimizer, and the forward pass if it has no collectives
    (replicas alone). It is measured on the host. Of a GPU that lags behind, the host's time in the
    forward pass is the time of the kernels as soon as their queue is full.

    A rank is slow if this time exceeds `SLOW_RATIO` times the median rank's, and the difference
    exceeds `SLOW_SHARE` of the step, in `ROWS_IN_A_ROW` rows of metrics.jsonl.

    Args:
        group: a gloo group of all ranks; None for one process, which measures nothing.
        warn: shows a message to the user, on rank 0.
        local_forward: whether the forward pass has no collectives.
    """

    def __init__(
        self, group: ProcessGroup | None, warn: Callable[[str], None], *, local_forward: bool
    ) -> None:
        self._group = group
        self._phases = (*LOCAL_PHASES, *["forward"] * local_forward)
        self._warn = warn
        self._suspect, self._times = -1, 0
        self._step, self._started = -1, 0.0

    def compare(self, step: int) -> dict[str, float]:
        """Find the slowest rank; all ranks call it together.

        Args:
            step: number of finished steps.

        Returns:
            on rank 0 `slowest_rank`, and the seconds of a step that the slowest rank
            (`rank_seconds_max`) and the median rank (`rank_seconds_median`) spend by themselves;
            empty in one process, on other ranks, and at the first call.
        """
        if self._group is None:
            return {}
        steps, seconds = step - self._step, time.monotonic() - self._started
        mine = sum(heartbeat.seconds.get(name, 0.0) for name in self._phases)
        # The sums are of the steps since the last row, which all ranks write at the same steps.
        heartbeat.seconds.clear()
        is_first, self._step, self._started = self._step < 0, step, time.monotonic()
        if is_first or steps < 1:
            return {}
        # A gather and no reduction, because a median needs the time of each rank.
        share = torch.tensor([mine / steps], dtype=torch.float64)
        is_main = self._group.rank() == 0
        parts = [torch.empty_like(share) for _ in range(self._group.size())] if is_main else None
        dist.gather(share, parts, group=self._group, group_dst=0)
        return self._judge([float(part) for part in parts], seconds / steps) if parts else {}

    def _judge(self, own: list[float], step_seconds: float) -> dict[str, float]:
        slowest = max(range(len(own)), key=own.__getitem__)
        # Of two ranks the faster one: their mean would hide the slower.
        median = statistics.median_low(own)
        excess = own[slowest] - median
        is_slow = own[slowest] > SLOW_RATIO * median and excess > SLOW_SHARE * step_seconds
        self._times = self._times + 1 if is_slow and slowest == self._suspect else int(is_slow)
        self._suspect = slowest if is_slow else -1
        if self._times == ROWS_IN_A_ROW:
            self._warn(
                f"rank {slowest} makes the others wait: {own[slowest]:.3g} s of a step in "
                f"{', '.join(self._phases)}, where the median rank takes {median:.3g} s"
            )
        return {
            "slowest_rank": slowest,
            "rank_seconds_max": own[slowest],
            "rank_seconds_median": median,
        }
