"""One file of plain torch without any framework: the baseline, and the best loop that we know.

With `--best`: bf16, torch.compile, attention as two products, and the loss in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from turns import Turn
from workload import Workload, baseline_arguments

LOSS_ROWS = 128


class Attention(nn.Module):
    def __init__(self, load: Workload, as_products: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = load.heads, load.kv_heads, load.dim // load.heads
        self.query = nn.Linear(load.dim, load.dim, bias=False)
        self.key = nn.Linear(load.dim, load.kv_heads * self.width, bias=False)
        self.value = nn.Linear(load.dim, load.kv_heads * self.width, bias=False)
        self.out = nn.Linear(load.dim, load.dim, bias=False)
        self.as_products = as_products

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, D = x.shape
        q = turn(self.query(x).view(B, S, self.heads, self.width).transpose(1, 2), cos, sin)
        k = turn(self.key(x).view(B, S, self.kv_heads, self.width).transpose(1, 2), cos, sin)
        v = self.value(x).view(B, S, self.kv_heads, self.width).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        if self.as_products:
            scores = (q * self.width**-0.5) @ k.transpose(2, 3)
            future = torch.ones(S, S, dtype=torch.bool).triu(1)
            y = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, S, D))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, load: Workload, as_products: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(load.dim, load.norm_eps)
        self.attention = Attention(load, as_products)
        self.ffn_norm = nn.RMSNorm(load.dim, load.norm_eps)
        self.gate = nn.Linear(load.dim, load.ffn, bias=False)
        self.up = nn.Linear(load.dim, load.ffn, bias=False)
        self.down = nn.Linear(load.ffn, load.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        normed = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, load: Workload, best: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(load.vocab, load.dim)
        self.blocks = nn.ModuleList(Block(load, best) for _ in range(load.layers))
        self.norm = nn.RMSNorm(load.dim, load.norm_eps)
        self.head = nn.Linear(load.dim, load.vocab, bias=False)
        self.loss = loss_by_rows if best else whole_loss
        width = load.dim // load.heads
        frequencies = load.rope_theta ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(load.seq_len), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def whole_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def loss_by_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the same, by blocks of rows that stay in the processor's cache."""
    blocks = zip(logits.split(LOSS_ROWS), labels.split(LOSS_ROWS), strict=True)
    losses = [F.cross_entropy(rows.float(), y, reduction="sum") for rows, y in blocks]
    return torch.stack(losses).sum() / labels.numel()


def train(load: Workload, model: Llama, forward: Callable[..., Tensor], bf16: bool) -> None:
    turn = Turn()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=load.lr,
        betas=load.betas,
        eps=load.eps,
        weight_decay=load.weight_decay,
        fused=True,
    )
    data = np.memmap(load.tokens, dtype=np.uint16, mode="r")
    span = load.batch * load.seq_len
    for step in range(load.max_steps):
        flat = torch.from_numpy(data[step * span : (step + 1) * span + 1].astype(np.int64))
        tokens, labels = (t.view(load.batch, load.seq_len) for t in (flat[:-1], flat[1:]))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = forward(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), load.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        turn.step_done()


def main() -> None:
    parser = baseline_arguments(__doc__)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--best", action="store_true")
    options = parser.parse_args()
    load = Workload(options.vocab, options.tokens)
    torch.manual_seed(0)
    model = Llama(load, options.best)
    compiled = options.compile or options.best
    forward = torch.compile(model, fullgraph=True) if compiled else model
    train(load, model, forward, bf16=options.best)


if __name__ == "__main__":
    main()
