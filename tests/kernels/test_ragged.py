"""Attention, sums and selections within the samples of a flat row, beside one sample at a time."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.flash_formula import flash_on_cpu
from trainer.kernels.attention import ragged
from trainer.kernels.attention.local import attend
from trainer.kernels.attention.ragged import attend_varlen
from trainer.kernels.ragged import samples
from trainer.kernels.ragged.lengths import SampleLengths
from trainer.kernels.registry import kernels, load

ATTENTION = {name: load(kernels["attention"][name].target) for name in ("matmul", "sdpa")}
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=6)


def columns(total, heads=4, groups=2, width=6, value_width=4):
    generator = torch.Generator().manual_seed(total)
    shapes = [(heads, width), (groups, width), (groups, value_width), (heads, value_width)]
    every = (
        torch.randn(1, total, *shape, dtype=torch.float64, generator=generator) for shape in shapes
    )
    *inputs, direction = every
    return [x.requires_grad_() for x in inputs], direction


def one_at_a_time(base, inputs, lengths, **limits):
    parts = zip(*(torch.split(x, lengths, 1) for x in inputs), strict=True)
    return torch.cat([attend(base, *part, **limits) for part in parts], 1)


def assert_same(out, expected, inputs, direction):
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    found, wanted = (torch.autograd.grad(x, inputs, direction) for x in (out, expected))
    for gradient, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["matmul", "sdpa"])
@pytest.mark.parametrize("limits", [{}, {"window": 7}, {"chunk": 9}, {"window": 5, "sinks": True}])
@given(LENGTHS)
@settings(max_examples=4, deadline=None)
def test_attention_in_blocks_is_attention_in_each_sample(name, limits, lengths):
    inputs, direction = columns(sum(lengths))
    if limits.get("sinks"):
        inputs.append(torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_())
        limits = {**limits, "sinks": inputs[-1]}
    row = SampleLengths(lengths)
    out = attend(ATTENTION[name], *inputs[:3], row, **limits)
    assert_same(
        out, one_at_a_time(ATTENTION[name], inputs[:3], lengths, **limits), inputs, direction
    )


@given(LENGTHS)
def test_blocks_hold_every_position_once_and_little_padding(lengths):
    row = SampleLengths(lengths)
    blocks, total = row.blocks, sum(lengths)
    assert sum(block.samples for block in blocks.shapes) == len(lengths)
    assert len(blocks.sources) == sum(block.samples * block.width for block in blocks.shapes)
    assert blocks.sources[blocks.slots].tolist() == list(range(total))
    # A sample is shorter than its block by 16 positions or a quarter at most.
    allowed = sum(max(16, block.width // 4) * block.samples for block in blocks.shapes)
    assert len(blocks.sources) - total <= allowed


def test_samples_of_one_length_are_not_copied(monkeypatch):
    monkeypatch.setattr(ragged._ToBlocks, "forward", None)
    inputs, direction = columns(3 * 8)
    out = attend(ATTENTION["matmul"], *inputs, SampleLengths([8, 8, 8]))
    assert_same(out, one_at_a_time(ATTENTION["matmul"], inputs, [8, 8, 8]), inputs, direction)


@pytest.mark.parametrize("window", [None, 6])
def test_flat_rows_reach_torchs_kernel_as_it_takes_them(window):
    lengths = [5, 1, 17, 9]
    inputs, direction = columns(sum(lengths), width=8, value_width=4)
    base = partial(attend, ATTENTION["matmul"])
    with flash_on_cpu():
        out = attend_varlen(base, *inputs, SampleLengths(lengths), window=window)
        expected = one_at_a_time(ATTENTION["matmul"], inputs, lengths, window=window)
        assert_same(out, expected, inputs, direction)


@pytest.mark.parametrize("limits", [{"chunk": 4}, {"softcap": 0.5}, {}])
def test_what_torchs_kernel_cannot_do_is_done_in_blocks(limits, monkeypatch):
    monkeypatch.setattr(ragged, "attend_runs", None)  # calling it would fail
    lengths = [5, 1, 17, 9]
    inputs, direction = columns(sum(lengths))
    base = partial(attend, ATTENTION["matmul"])
    out = attend_varlen(base, *inputs, SampleLengths(lengths), **limits)
    assert_same(
        out, one_at_a_time(ATTENTION["matmul"], inputs, lengths, **limits), inputs, direction
    )


@given(LENGTHS)
@settings(max_examples=15, deadline=None)
def test_numbers_by_sample_are_those_of_each_sample_alone(lengths):
    row = SampleLengths(lengths)
    values = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    parts = values.split(lengths)
    pairs = [
        (samples.sum_by_sample(values, row), torch.stack([x.sum(0) for x in parts])),
        (samples.last_of_sample(values, row), torch.stack([x[-1] for x in parts])),
        (
            samples.pad_samples(values, row, -1.0),
            torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-1.0),
        ),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected)
        direction = torch.randn_like(expected)
        gradients = [torch.autograd.grad(x, values, direction)[0] for x in (found, expected)]
        torch.testing.assert_close(*gradients)
    padded = samples.pad_samples(values, row)
    assert padded[row.numbers, samples.positions_in_samples(row)].equal(values)
    mask = values[:, 0] > 0
    assert samples.sum_by_sample(mask, row).tolist() == [int(x.sum()) for x in mask.split(lengths)]
    assert samples.positions_in_samples(row).tolist() == [i for n in lengths for i in range(n)]


def test_narrow_numbers_are_summed_in_fp32():
    row = SampleLengths([1000, 3])
    sums = samples.sum_by_sample(torch.ones(1003, dtype=torch.bfloat16), row)
    assert sums.dtype == torch.float32
    assert sums.tolist() == [1000, 3]
