"""Routing plans against sorted Python lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.child import needs_triton
from tests.kernels.compiled import compiled, on_each_triton
from tests.kernels.guarded import guards, surrounded
from tests.kernels.interpreted import interpreted
from trainer.kernels.routing import op, reference


def listed(plan):
    return [value.tolist() for value in plan]


def plan_of(sel, num_experts, block_m):
    """Return the plan's fields as lists, made by sorting pairs."""
    pairs = sorted(
        (expert, token, choice)
        for token, row in enumerate(sel)
        for choice, expert in enumerate(row)
    )
    counts = [sum(expert == e for expert, _, _ in pairs) for e in range(num_experts)]
    ends = [sum(counts[: e + 1]) for e in range(num_experts)]
    slot = [[pairs.index((e, t, a)) for a, e in enumerate(row)] for t, row in enumerate(sel)]
    tiles = [
        expert << 16 | tile
        for expert, count in enumerate(counts)
        for tile in range(-(-count // block_m))
    ]
    bound = -(-len(pairs) // block_m) + num_experts
    padded = tiles + [-1] * (bound - len(tiles))
    tokens = [token for _, token, _ in pairs]
    return [counts, ends, [0, *ends], tokens, slot, padded, [len(tiles)]]


def plan_in_the_interpreter(sel, num_choices, num_experts, block_m):
    from trainer.kernels.routing import triton

    sel = torch.tensor(sel).reshape(-1, num_choices)
    with guards():
        plan = triton.routing_plan(surrounded(sel), num_experts, block_m=block_m)
    return listed(plan)


@st.composite
def choices(draw, most_tokens=40):
    """Return sel, the choices a token, the experts and the rows a tile."""
    num_experts = draw(st.integers(1, 9))
    num_choices = draw(st.integers(1, 3))
    expert = st.integers(0, draw(st.integers(0, num_experts - 1)))  # often a few hot ones
    row = st.lists(expert, min_size=num_choices, max_size=num_choices)
    sel = draw(st.lists(row, max_size=most_tokens))
    return sel, num_choices, num_experts, draw(st.sampled_from([1, 4, 16]))


@settings(deadline=None)
@given(choices())
def test_rows_are_sorted_by_expert_and_then_by_token(case):
    sel, num_choices, num_experts, block_m = case
    chosen = torch.tensor(sel, dtype=torch.int32).reshape(-1, num_choices)
    plan = op.routing_plan(chosen, num_experts, block_m=block_m)
    assert listed(plan) == plan_of(sel, num_experts, block_m)
    assert all(value.dtype == torch.int32 for value in plan)


@needs_triton
@settings(max_examples=15, deadline=None)
@given(choices())
def test_triton_plans_the_same(case):
    sel, num_choices, num_experts, block_m = case
    got = interpreted(plan_in_the_interpreter, sel, num_choices, num_experts, block_m)
    assert got == plan_of(sel, num_experts, block_m)


@needs_triton
@pytest.mark.parametrize("num_experts", [1, 60, 128])
def test_triton_plans_many_blocks(num_experts):
    """More choices than one block holds, and more blocks than one step of the sum."""
    torch.manual_seed(0)
    sel = torch.randint(0, num_experts, (700, 2)).tolist()
    got = interpreted(plan_in_the_interpreter, sel, 2, num_experts, 16)
    expected = reference.routing_plan(torch.tensor(sel), num_experts, block_m=16)
    assert got == listed(expected)


def test_the_plan_is_an_operation_that_compiles():
    sel = torch.randint(0, 5, (12, 2))
    torch.library.opcheck(op._routing_plan, (sel, 5, 4))
    plan = torch.compile(lambda s: op.routing_plan(s, 5, block_m=4), fullgraph=True)
    assert listed(plan(sel)) == listed(reference.routing_plan(sel, 5, block_m=4))


def test_what_a_tile_map_cannot_hold_is_refused():
    assert reference.tile_bound(2**20, 8, 128) == 2**13 + 8
    with pytest.raises(ValueError, match="split the rows"):
        reference.tile_bound(128 * 2**16 + 1, 8, 128)
    with pytest.raises(ValueError, match="groups"):
        reference.tile_bound(16, 2**15, 128)


def permuted(counts, max_len, alignment, pad_empty):
    """Return indices, sizes, offsets and overflow, made row by row."""
    num_experts = len(counts[0])
    firsts, first = [], 0
    for row in counts:
        firsts.append([first + sum(row[:e]) for e in range(num_experts)])
        first += sum(row)
    places, ends = [], []
    for e in range(num_experts):
        rows = [firsts[rank][e] + i for rank, row in enumerate(counts) for i in range(row[e])]
        size = -(-len(rows) // alignment) * alignment
        if pad_empty:
            size = max(size, alignment)
        places += rows + [-1] * (size - len(rows))
        ends.append(len(places))
    cut = [min(end, max_len) for end in ends]
    sizes = [end - start for start, end in zip([0, *cut], cut, strict=False)]
    indices = (places + [-1] * max_len)[:max_len]
    return [indices, sizes, cut, [len(places) > max_len]]


def indices_in_the_interpreter(counts, *options):
    from trainer.kernels.routing import triton

    tokens = torch.tensor(counts, dtype=torch.int32)
    with guards():
        found = triton.generate_permute_indices(
            surrounded(tokens.flatten()),
            tokens.shape[1],
            len(tokens),
            *options[:2],
            pad_empty=options[2],
        )
    return listed(found)


@st.composite
def counts_of_ranks(draw):
    ranks, experts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 9), min_size=experts, max_size=experts)
    counts = draw(st.lists(row, min_size=ranks, max_size=ranks))
    return counts, draw(st.integers(0, 150)), draw(st.sampled_from([1, 4, 8])), draw(st.booleans())


@settings(deadline=None)
@given(counts_of_ranks())
def test_rows_of_ranks_are_grouped_by_expert(case):
    counts, max_len, alignment, pad_empty = case
    tokens = torch.tensor(counts, dtype=torch.int32)
    found = reference.generate_permute_indices(
        tokens.flatten(), tokens.shape[1], len(tokens), max_len, alignment, pad_empty=pad_empty
    )
    assert listed(found) == permuted(*case)


@needs_triton
@settings(max_examples=15, deadline=None)
@given(counts_of_ranks())
def test_triton_groups_the_same(case):
    assert interpreted(indices_in_the_interpreter, *case) == permuted(*case)


def launch_plans(token_counts):
    from trainer.kernels.routing import triton

    for tokens in token_counts:
        triton.routing_plan(torch.zeros(tokens, 8, dtype=torch.int32), 128)
        triton.generate_permute_indices(torch.zeros(64, dtype=torch.int32), 8, 8, tokens, 16)


@pytest.mark.matrix
@needs_triton
@on_each_triton
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_plans_compile_once_for_all_token_counts(arch, triton):
    found = compiled(launch_plans, [1, 2, 16, *range(1000, 1017)], arch=arch, triton=triton)
    names = [kernel.name for kernel in found]
    assert sorted(names) == ["_count_kernel", "_indices_kernel", "_place_kernel", "_sum_kernel"]
    assert [kernel.spill_bytes for kernel in found] == [0, 0, 0, 0]
