"""Weights in files: what is saved, converted and merged; and rotary positions."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import alone, on_ranks
from tests.known_bugs.runs import assembled, assert_equal, enlarge, whole
from trainer.engine.checkpoint.ranks import Ranks
from trainer.engine.checkpoint.tensors import InMemoryTensor
from trainer.engine.checkpoint.writer import Writer
from trainer.engine.conversion import meta
from trainer.engine.lora import adapter_weights
from trainer.engine.lora.tables import LoRA
from trainer.kernels.rotary.reference import rotary
from trainer.model_zoo.layers import rotary as angles
from trainer.model_zoo.layers.dense import AdaptedLinear, Linear
from trainer.model_zoo.layers.rotary import frequencies, rotation

LORA = {"lora": {"rank": 2, "alpha": 6, "targets": ["*.q.weight", "*.down.weight"]}}


def adapted():
    """Return an adapted projection with random weights, and what it computes of a tensor."""
    generator = torch.Generator().manual_seed(0)
    layer = AdaptedLinear(Linear(6, 5), rank=2, scale=LoRA(rank=2, alpha=6.0).scale())
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    x = torch.randn(3, 6, generator=generator)
    combined = layer.weight + 6 / 2 * layer.lora_b @ layer.lora_a
    return layer, x, x @ combined.T


def scale_by_alpha_alone(patch):
    patch.setattr(LoRA, "scale", lambda table, rank=None: table.alpha)


@known_bug(
    "Blaizzy/mlx-vlm#841",
    "Adapters were multiplied by alpha instead of alpha divided by the rank.",
    scale_by_alpha_alone,
)
def an_adapter_is_scaled_by_alpha_over_its_rank():
    layer, x, expected = adapted()
    assert_equal(layer(x), expected)


def merge_without_scale(patch):
    original = adapter_weights.merge
    patch.setattr(
        adapter_weights,
        "merge",
        lambda weight, down, up, scale, *norms: original(weight, down, up, 1.0, *norms),
    )


@known_bug(
    "hao-ai-lab/FastVideo#870",
    "Adapters were merged without alpha divided by the rank, so that a merged model was another one"
    " than the trained one.",
    merge_without_scale,
)
def a_merged_projection_computes_what_the_adapted_one_did():
    layer, x, expected = adapted()
    model = torch.nn.Sequential(layer)
    assert_equal(F.linear(x, adapter_weights.merged_weights(model)["0.weight"]), expected)


def merged(changes):
    """Return the merged weights of a run, whose adapters are filled with numbers."""
    parts = assembled(**changes)
    enlarge(parts.model)
    with torch.no_grad():
        for name, weight in parts.model.named_parameters():
            if name.endswith("lora_b"):
                weight.fill_(0.5)
    return {name: whole(w) for name, w in adapter_weights.merged_weights(parts.model).items()}


def merge_the_parts_of_one_rank(patch):
    original = adapter_weights._merge_pieces

    def merge_pieces(weight, down, up, *others):
        mine = float(torch.distributed.get_rank() == 0)
        return original(weight, down * mine, up * mine, *others)

    patch.setattr(adapter_weights, "_merge_pieces", merge_pieces)


@known_bug(
    "meta-pytorch/torchtune#506",
    "Adapters that ranks held in parts were merged from the parts of one rank.",
    merge_the_parts_of_one_rank,
    world=2,
)
def parts_of_adapters_are_merged_as_wholes():
    changes = {**LORA, "run": {"steps": 1}}
    expected = alone(merged, changes)
    for found in on_ranks(2, merged, {**changes, "parallel": {"shard": 2}}):
        for name, weight in found.items():
            assert_equal(weight, expected[name], name)


def turned_as_complex_numbers(x, positions, theta):
    """Return [S, H, K] turned in neighbouring pairs, as its paper does, in complex numbers."""
    width = x.shape[-1]
    slow = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = torch.polar(torch.ones(1, dtype=torch.float64), positions.double().unsqueeze(1) * slow)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(-2)


def scores_of(q, k):
    return torch.einsum("shk,thk->hst", q, k)


def read_as_it_is(patch):
    patch.setattr(meta.Interleaved, "read", lambda self, first, last: self.source.read(first, last))


@known_bug(
    "pytorch/torchtitan#1441",
    "Query and key weights were converted without the permutation between the two orders of rotary"
    " pairs, and a converted model had slightly different logits.",
    read_as_it_is,
)
def converted_queries_and_keys_are_turned_in_the_pairs_of_their_own_order():
    generator = torch.Generator().manual_seed(0)
    heads, width, dim, places = 2, 8, 6, torch.arange(5)
    x = torch.randn(5, dim, generator=generator)
    theirs, ours = [], []
    for _ in ("queries", "keys"):
        weight = torch.randn(heads * width, dim, generator=generator)
        converted = meta.Interleaved(InMemoryTensor(weight), weight.shape, width)
        theirs.append(turned_as_complex_numbers((x @ weight.T).view(5, heads, width), places, 1e4))
        own = (x @ converted.read(0, heads * width).T).view(1, 5, heads, width)
        ours.append(rotary(own, *rotation(places, frequencies(width, 1e4)))[0])
    assert_equal(scores_of(*ours), scores_of(*theirs))


def round_to_bf16(patch):
    original = angles.frequencies

    def frequencies(*args):
        return original(*args).bfloat16().float()

    patch.setattr(angles, "frequencies", frequencies)


@known_bug(
    "Modalities/modalities#462",
    "The frequencies of the rotary embedding were computed in bf16, and far positions were wrong.",
    round_to_bf16,
)
def far_positions_are_turned_by_exact_angles():
    places = torch.tensor([0, 1, 511, 2047])
    x = torch.randn(4, 1, 16, generator=torch.Generator().manual_seed(0))
    order = torch.arange(16).view(2, 8).T.flatten()  # halves as neighbours
    cos, sin = rotation(places, angles.frequencies(16, 1e4))
    found = rotary(x.unsqueeze(0), cos, sin)[0][..., order]
    expected = turned_as_complex_numbers(x[..., order], places, 1e4)
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


def written_after_an_update(state, updates):
    """Return what is written of a state that is updated in place between copying and writing."""
    writer = Writer(Ranks(None), torch.empty_like)
    found = []
    for _ in range(updates):
        writer.plan(state)
        writer.copy(None)
        expected = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            tensor.add_(1)
        with tempfile.TemporaryDirectory() as folder:
            (name,) = writer.write(Path(folder))
            found.append((load_file(Path(folder, name)), expected))
    return found


def assert_writes_what_was_copied(updates):
    state = {"weight": torch.arange(6.0)}
    for found, expected in written_after_an_update(state, updates):
        (stored,) = found.values()
        assert_equal(stored.flatten(), expected["weight"])


def keep_the_tensors(patch):
    patch.setattr(Writer, "copy", lambda self, after: None)


@known_bug(
    "pytorch/pytorch#144657",
    "Asynchronous checkpoints of tensors on the CPU were written from the tensors themselves, which"
    " the next step had changed meanwhile.",
    keep_the_tensors,
)
def an_update_does_not_reach_the_checkpoint_before_it():
    assert_writes_what_was_copied(1)


def copy_once(patch):
    original = Writer.copy

    def copy(self, after):
        if self._buffers:
            self._sources = dict(self._buffers)
            return None
        return original(self, after)

    patch.setattr(Writer, "copy", copy)


@known_bug(
    "NVIDIA-NeMo/RL#3312",
    "The structure of a checkpoint was kept for the next one and its tensors with it: all later"
    " checkpoints held what the first one had.",
    copy_once,
)
def later_checkpoints_hold_later_weights():
    assert_writes_what_was_copied(3)
