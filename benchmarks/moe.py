"""CPU seconds of a step of a mixture of experts: ours, a bare loop, and transformers' Mixtral.

All have the same weights and tokens, the same AdamW, and one thread of one process; they take turns
step by step. The bare loop computes the same with `torch.nn.functional.grouped_mm`, and otherwise
as `baselines/bare.py` does, in bf16 at its best, without compilation. bf16 is autocast, but for
ours, which casts by itself. The number to read is the median over rounds of our seconds over
another's.

    python benchmarks/moe.py --write
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "baselines"))

import results
import torch
import torch.nn.functional as F
from bare import Block, Llama
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from workload import Workload

from trainer.kernels.choose import choose
from trainer.kernels.cross_entropy.reference import linear_cross_entropy
from trainer.model_zoo.mixtral.config import MixtralConfig

OURS = "trainer"
VOCAB, SEQ_LEN, LAYERS = 2048, 256, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    dim: int
    experts: int
    chosen: int
    width: int
    batch: int


SIZES = {"few": Size(256, 8, 2, 256, 8), "many": Size(512, 32, 4, 128, 4)}
Loss = Callable[[Tensor, Tensor], Tensor]


class BareExperts(nn.Module):
    """Experts as one writes them down; the weights' names are transformers'."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.chosen = size.chosen
        self.gate = nn.Linear(size.dim, size.experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(size.experts, 2 * size.width, size.dim))
        self.down_proj = nn.Parameter(torch.empty(size.experts, size.dim, size.width))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        with torch.autocast("cpu", enabled=False):
            shares = F.linear(flat.float(), self.gate.weight).softmax(-1)
        weight, chosen = shares.topk(self.chosen)
        weight = weight / weight.sum(-1, keepdim=True)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        order = chosen.flatten().argsort(stable=True)
        token = order // self.chosen
        offs = chosen.flatten().bincount(minlength=len(self.down_proj)).cumsum(0).int()
        rows = flat.to(dtype).index_select(0, token)
        gate, up = F.grouped_mm(rows, self.gate_up_proj.to(dtype).mT, offs=offs).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down_proj.to(dtype).mT, offs=offs)
        out = out * weight.flatten()[order].unsqueeze(1).to(dtype)
        return torch.zeros_like(flat, dtype=dtype).index_add(0, token, out).view_as(x)


class BareBlock(Block):
    """A block of the dense model with experts."""

    def __init__(self, load: Workload, size: Size, best: bool) -> None:
        super().__init__(load, as_products=best)
        del self.gate, self.up, self.down
        self.experts = BareExperts(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.experts(self.ffn_norm(x))


def baselines(size: Size, dtype: torch.dtype) -> dict[str, tuple[nn.Module, Loss]]:
    """Return models with the same weights, and what makes the loss of tokens and labels."""
    config = MixtralConfig(
        dim=size.dim,
        n_layers=LAYERS,
        n_heads=8,
        n_kv_heads=4,
        vocab_size=VOCAB,
        max_seq_len=SEQ_LEN,
        moe={
            "num_experts": size.experts,
            "experts_per_token": size.chosen,
            "expert_ffn_dim": size.width,
            "aux_weight": 0.0,
        },
    )
    settings = {**config.hf_config(), "use_cache": False, "attn_implementation": "sdpa"}
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**settings, experts_implementation="grouped_mm")
    )
    state = {name: tensor.detach().clone() for name, tensor in theirs.state_dict().items()}
    ours = config.build(choose({}, "cpu", SEQ_LEN))
    ours.compute_dtype = dtype
    found = translated(config.layout.hf_names, state, "block_sparse_moe", "mlp")
    shapes = {name: weight.shape for name, weight in ours.named_parameters()}
    ours.load_state_dict({name: weight.view(shapes[name]) for name, weight in found.items()})
    load = Workload(
        VOCAB, Path(), dim=size.dim, layers=LAYERS, heads=8, kv_heads=4,
        seq_len=SEQ_LEN, batch=size.batch,
    )  # fmt: skip
    bf16 = dtype is torch.bfloat16
    bare = Llama(load, best=bf16)
    bare.blocks = nn.ModuleList(BareBlock(load, size, best=bf16) for _ in range(LAYERS))
    bare.load_state_dict(translated(BARE_NAMES, state), strict=False)

    def our_loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return ours(tokens, labels=labels, loss=linear_cross_entropy) / labels.numel()

    def bare_loss(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return bare(tokens, labels)

    def their_loss(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return theirs(input_ids=tokens, labels=labels, shift_labels=labels).loss

    return {
        "bare loop": (bare, bare_loss),
        OURS: (ours, our_loss),
        "transformers Mixtral": (theirs, their_loss),
    }


BARE_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "blocks.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blocks.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blocks.{i}.attention.query.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blocks.{i}.attention.key.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blocks.{i}.attention.value.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blocks.{i}.attention.out.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blocks.{i}.experts.gate.weight": "model.layers.{i}.mlp.gate.weight",
    "blocks.{i}.experts.gate_up_proj": "model.layers.{i}.mlp.experts.gate_up_proj",
    "blocks.{i}.experts.down_proj": "model.layers.{i}.mlp.experts.down_proj",
}


def translated(
    names: Mapping[str, str], state: Mapping[str, Tensor], *renamed: str
) -> dict[str, Tensor]:
    """Return a state by other names; `{i}` stands for a block's number."""
    found = {}
    for number in range(LAYERS):
        for mine, theirs in names.items():
            source = theirs.replace("{i}", str(number))
            source = source.replace(*renamed) if renamed else source
            if source in state:  # other heads have names too
                found[mine.replace("{i}", str(number))] = state[source]
    return found


def measure(size: Size, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """Let all train side by side; return their seconds, and the ratios of ours to them."""
    torch.manual_seed(0)
    models = baselines(size, DTYPES[dtype])
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
        for name, (model, _) in models.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 2):
        rows = torch.randint(VOCAB, (size.batch, SEQ_LEN + 1))
        losses = {}
        for name in models if turn % 2 else reversed(models):
            model, loss_of = models[name]
            begin = time.process_time()
            loss = loss_of(rows[:, :-1], rows[:, 1:].contiguous())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name].append(time.process_time() - begin)
            losses[name] = loss.item()
        if turn == 0:  # later, AdamW makes much of small differences
            spread = max(losses.values()) - min(losses.values())
            assert spread < (1e-5 if dtype == "fp32" else 1e-2), f"not the same model: {losses}"
    return [row(name, seconds) for name in models]


def row(name: str, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return a baseline's seconds, and the ratios of ours to them in the same rounds."""
    its, ours = seconds[name][2:], seconds[OURS][2:]
    low, middle, high = statistics.quantiles((a / b for a, b in zip(ours, its, strict=True)), n=4)
    return {
        "name": name,
        "cpu_ms": round(1e3 * statistics.median(its), 1),
        "ratio": round(middle, 3),
        "ratio_of_least": round(min(ours) / min(its), 3),
        "quartiles": [round(low, 3), round(high, 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all")
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = []
    for name in options.size or SIZES:
        for dtype in options.dtype or DTYPES:
            rows = measure(SIZES[name], dtype, options.rounds)
            measured.append({"size": vars(SIZES[name]), "dtype": dtype, "baselines": rows})
            print(f"\n{name} experts, {dtype}: CPU seconds a step, and ours over them")
            print(show(rows))
    if options.write:
        found = {"rounds": options.rounds, "layers": LAYERS, "vocab": VOCAB, "measured": measured}
        print(f"written to {results.append('moe', found).name}")


def show(rows: list[dict[str, Any]]) -> str:
    heads = ["", "CPU ms", "ratio", "quartiles", "of least"]
    lines = [
        [
            each["name"],
            f"{each['cpu_ms']:.0f}",
            f"{each['ratio']:.3f}",
            "{:.3f} - {:.3f}".format(*each["quartiles"]),
            f"{each['ratio_of_least']:.3f}",
        ]
        for each in rows
    ]
    return results.table(heads, lines)


if __name__ == "__main__":
    main()
