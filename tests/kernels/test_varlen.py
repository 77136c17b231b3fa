"""Flash attention of flat rows in place of masks: beside masks, by the formulas in float64."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.cases import also
from tests.distributed import run_ranks
from tests.kernels.flash_formula import flash_on_cpu
from trainer.engine.core.registry import models
from trainer.engine.data.batch import TokenBatch
from trainer.engine.parallel.context.context import ContextParallel
from trainer.engine.parallel.plan import make_plan
from trainer.engine.parallel.tables import Parallel
from trainer.kernels.attention import varlen
from trainer.kernels.attention.local import attend
from trainer.kernels.attention.ragged import attend_varlen
from trainer.kernels.attention.reference import document_mask, sdpa
from trainer.kernels.attention.varlen import attend_rows, find_documents
from trainer.kernels.choose import choose
from trainer.kernels.ragged.lengths import SampleLengths
from trainer.kernels.torch_private import TorchDispatchMode

HEADS, GROUPS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
# Of one length in all: short and long documents, one alone, and one token each.
DOCUMENTS = [[3, 1, 11, 9], [24], [1] * 20 + [4]]
ATTEND = partial(attend, sdpa, ragged=attend_varlen, varlen=attend_rows)


def ids_of(rows=DOCUMENTS):
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    return torch.stack(numbers).int()


def columns(batch, queries, keys):
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = [
        (batch, queries, HEADS, WIDTH),
        (batch, keys, GROUPS, WIDTH),
        (batch, keys, GROUPS, VALUE_WIDTH),
        (HEADS,),
        (batch, queries, HEADS, VALUE_WIDTH),
    ]
    *inputs, direction = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return [x.requires_grad_() for x in inputs], direction


def assert_same(found, expected, inputs, direction):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    ours, wanted = (torch.autograd.grad(x, inputs, direction) for x in (found, expected))
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("first", [0, 7, 23])
def test_documents_are_attended_to_as_with_a_mask(first, window, has_sinks):
    ids = ids_of()
    end = 24 if first == 23 else 20
    queries, keys = ids[:, first:end], ids[:, :end]
    (q, k, v, sinks), direction = columns(len(ids), end - first, end)
    inputs = [q, k, v, *([sinks] if has_sinks else [])]
    limits = {"window": window, "sinks": sinks if has_sinks else None}
    documents = find_documents(queries, keys, max_documents=32)
    with flash_on_cpu(), patch.object(varlen, "document_mask", None):
        found = ATTEND(q, k, v, documents, **limits)
        expected = attend(sdpa, q, k, v, document_mask(queries, keys), **limits)
        assert_same(found, expected, inputs, direction)


def test_documents_are_attended_to_in_both_directions():
    ids = ids_of()
    (*inputs, _), direction = columns(len(ids), 24, 24)
    with flash_on_cpu():
        found = ATTEND(*inputs, find_documents(ids, ids, max_documents=32), causal=False)
        mask = document_mask(ids, ids, causal=False)
        assert_same(found, sdpa(*inputs, mask, causal=False), inputs, direction)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (6, 24), (2, 3)])
def test_queries_at_the_end_of_more_keys_and_windows_need_no_mask(queries, keys, window):
    (*inputs, _), direction = columns(2, queries, keys)
    place = torch.arange(keys - queries, keys).unsqueeze(1) - torch.arange(keys)
    mask = (place >= 0) & (place < (window or keys))
    expected = sdpa(*inputs, mask.expand(2, 1, -1, -1))
    with flash_on_cpu(), patch("torch.ones", None), patch("torch.Tensor.unfold", None):
        found = ATTEND(*inputs, window=window)
        assert_same(found, expected, inputs, direction)


@pytest.mark.parametrize("limits", [{}, {"window": 4}, {"window": 3, "sinks": True}])
def test_samples_of_a_flat_row_are_attended_to_as_one_at_a_time(limits):
    lengths = [5, 1, 17, 9]
    (*inputs, sinks), direction = columns(1, 32, 32)
    if limits.get("sinks"):
        limits, inputs = {**limits, "sinks": sinks}, [*inputs, sinks]
    parts = zip(*(torch.split(x, lengths, 1) for x in inputs[:3]), strict=True)
    expected = torch.cat([attend(sdpa, *part, **limits) for part in parts], 1)
    with flash_on_cpu():
        found = ATTEND(*inputs[:3], SampleLengths(lengths), **limits)
        assert_same(found, expected, inputs, direction)


def test_capped_scores_are_computed_with_the_mask_of_the_documents():
    ids = ids_of()
    (*inputs, _), direction = columns(len(ids), 24, 24)
    with flash_on_cpu():
        found = ATTEND(*inputs, find_documents(ids, ids, max_documents=32), softcap=0.5)
        expected = sdpa(*inputs, document_mask(ids, ids), softcap=0.5)
        assert_same(found, expected, inputs, direction)


def test_float32_is_computed_with_the_mask_of_the_documents():
    ids = ids_of()
    (*inputs, _), _ = columns(len(ids), 24, 24)
    q, k, v = (x.detach().float() for x in inputs)
    found = ATTEND(q, k, v, find_documents(ids, ids, max_documents=32))
    assert torch.equal(found, sdpa(q, k, v, document_mask(ids, ids)))


def test_the_host_counts_the_documents_of_a_row():
    ids = ids_of()
    batch = TokenBatch(ids.long(), ids.long(), document_ids=ids)
    assert batch.count_documents().max_documents == 32  # 21, up to a power of two
    assert [each.max_documents for each in batch.count_documents().split(1)] == [32] * 3
    one = TokenBatch(ids[1:2].long(), ids[1:2].long(), document_ids=ids[1:2])
    assert one.count_documents().max_documents == 1
    assert TokenBatch(ids, ids).count_documents().max_documents is None


@pytest.mark.parametrize(
    ("family", "dtype", "device", "expected"),
    [
        ("llama3", torch.bfloat16, "cuda", 32),
        ("llama3", torch.float32, "cuda", None),
        ("llama3", torch.bfloat16, "cpu", None),
        ("gemma2", torch.bfloat16, "cuda", None),
    ],
)
def test_documents_are_counted_only_where_no_mask_is_needed(family, dtype, device, expected):
    # A mask would else be made in each block in place of once.
    config = models[family].model_validate({"name": family, **SIZES, **FAMILIES[family]})
    model = config.build(kernels_of(has_varlen=True))
    model.compute_dtype = dtype
    plan = replace(make_plan(Parallel(), 0, 1, torch.device("cpu")), device=torch.device(device))
    ids = ids_of()
    batch = TokenBatch(ids.long(), ids.long(), document_ids=ids)
    assert plan.take(batch, model).max_documents == expected


# Each with windows, chunks, sinks or wide values where the family has them.
SIZES = {"dim": 32, "n_layers": 4, "n_heads": 4, "vocab_size": 61, "init_std": 0.3}
EXPERTS = {"num_experts": 4, "expert_ffn_dim": 24}
FAMILIES = {
    "llama3": {"n_kv_heads": 2},
    "qwen3": {"n_kv_heads": 1},
    "gemma3": {"n_kv_heads": 2, "window": 5, "full_every": 2},
    "gemma2": {"n_kv_heads": 2, "window": 5, "attention_softcap": 1.5},
    "gpt_oss": {"n_kv_heads": 2, "window": 5, "moe": EXPERTS},
    "llama4": {"n_kv_heads": 2, "chunk": 8, "ffn_dim": 48, "moe": EXPERTS},
    "deepseek_v3": {"mtp_depth": 1},
}


def kernels_of(has_varlen):
    chosen = choose({"attention": "sdpa"}, "cpu", 64)
    if not has_varlen:
        return chosen
    return replace(chosen, attention=ATTEND, attention_mask=find_documents)


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_learn_the_same_as_with_masks(family, with_documents):
    config = models[family].model_validate({"name": family, **SIZES, **FAMILIES[family]})
    ids = ids_of() if with_documents else None
    tokens = torch.randint(0, 61, (3, 24), generator=torch.Generator().manual_seed(1))
    gradients, state = [], None
    for has_varlen in (False, True):
        torch.manual_seed(0)
        model = config.build(kernels_of(has_varlen)).double()
        model.compute_dtype = torch.float64
        model.init_buffers(torch.device("cpu"))
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
        if state is not None:
            model.load_state_dict(state)
        state = model.state_dict()
        # No mask of documents is made where scores have no cap.
        no_mask = patch.object(varlen, "document_mask", None)
        with flash_on_cpu(), no_mask if family != "gemma2" else nullcontext():
            loss = model(
                tokens,
                labels=tokens.roll(-1, 1),
                loss=choose({}, "cpu", 64).linear_cross_entropy,
                document_ids=ids,
                max_documents=32 if with_documents else None,
            )
            loss.sum().backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


REACHES = [{}, {"window": 5}, {"window": 5, "sinks": True}]


def context_differences(compiled):
    """Return how far outputs and gradients of this rank are from its part of the whole's."""
    context = ContextParallel(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    kernels = context.adapt_kernels(kernels_of(has_varlen=True), None)
    attend_part, found = kernels.attention, []
    if compiled:
        attend_part = torch.compile(attend_part, backend="aot_eager", fullgraph=True)
    for reach in [*REACHES, *({**reach, "documents": True} for reach in REACHES), {"chunk": 6}]:
        (*whole, sinks), direction = columns(3, 24, 24)
        limits = {name: reach.get(name) for name in ("window", "chunk")}
        limits["sinks"] = sinks if reach.get("sinks") else None
        ids = ids_of() if reach.get("documents") else None
        expected = attend(sdpa, *whole, None if ids is None else document_mask(ids, ids), **limits)
        wanted = [expected, *torch.autograd.grad(expected, whole, direction)]
        *mine, along = (
            torch.cat(context._mine(x.detach()), 1).contiguous() for x in (*whole, direction)
        )
        mine = [x.requires_grad_() for x in mine]
        # The first reach has queries at the end of more keys, without documents.
        with flash_on_cpu(), patch.object(varlen, "document_mask", None):
            seen = None
            if ids is not None:
                seen = kernels.attention_mask(ids, ids, max_documents=32)
            out = attend_part(*mine, seen, **limits)
            got = [out, *torch.autograd.grad(out, mine, along)]
        for part, all_of_it in zip(got, wanted, strict=True):
            found.append((part - torch.cat(context._mine(all_of_it), 1)).abs().max().item())
    return found


@pytest.mark.parametrize(("ranks", "compiled"), [(2, False), *also((3, False), (2, True))])
def test_ranks_that_share_a_sequence_attend_without_masks(ranks, compiled):
    for found in run_ranks(ranks, context_differences, compiled, timeout=200):
        assert len(found) == 7 * 4
        assert all(error < 1e-11 for error in found)


class Largest(TorchDispatchMode):
    """Records the largest result, and refuses what waits for the device."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "item"), name
        out = operation(*args, **kwargs or {})
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return out


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("queries", [512, 4096])
def test_no_tensor_grows_with_the_square_of_the_length_and_no_value_is_read(queries, window):
    with Largest() as largest:
        make = partial(torch.empty, device="meta", dtype=torch.bfloat16)
        q, k, v = make(1, queries, 4, 64), make(1, 4096, 2, 64), make(1, 4096, 2, 32)
        sinks = torch.empty(4, device="meta")
        ids = torch.empty(1, 4096, dtype=torch.int32, device="meta")
        documents = find_documents(ids[:, -queries:], ids, max_documents=16)
        assert documents.query_offsets.shape == documents.key_offsets.shape == (17,)
        for seen in (documents, None) if window or queries < 4096 else (documents,):
            out = ATTEND(q, k, v, seen, window=window, sinks=sinks)
            assert out.shape == (1, queries, 4, 32)
            assert out.dtype == torch.bfloat16
    assert largest.numel <= 4096 * 4 * 64
    assert largest.numel < queries * 4096


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_documents_are_compiled_whole_for_any_number_of_them(backend):
    torch._dynamo.reset()
    ids = ids_of()
    (q, k, v, sinks), direction = columns(len(ids), 24, 24)
    compiled = torch.compile(ATTEND, backend=backend, fullgraph=True)
    with flash_on_cpu():
        for most in (21, 32, 64):
            documents = find_documents(ids, ids, max_documents=most)
            found = compiled(q, k, v, documents, window=4, sinks=sinks)
            expected = attend(sdpa, q, k, v, document_mask(ids, ids), window=4, sinks=sinks)
            assert_same(found, expected, [q, k, v, sinks], direction)
