"""A mixture of experts token by token, in float64: what the layer is compared with."""

import torch
import torch.nn.functional as F
from torch import nn

from trainer.kernels.choose import choose
from trainer.model_zoo.layers.configs import MoESettings
from trainer.model_zoo.layers.moe import MoE

DIM, EPS = 16, 1e-5


def layer(dtype=torch.float64, dim=DIM, **settings):
    """Return a layer with random weights of one size and, if it has one, a random bias."""
    torch.manual_seed(0)
    found = MoE(dim, MoESettings(**settings), EPS, choose({}, "cpu", 8))
    for weight in found.parameters():
        nn.init.normal_(weight, std=0.5)
    if found.router.bias is not None:
        nn.init.normal_(found.router.bias, std=0.2)
    return found.to(dtype)


def tokens(batch=3, length=20, dim=DIM, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(batch, length, dim, dtype=dtype)


def by_tokens(moe, x):
    """Return the layer's output, its choices as lists, and the router's summed losses."""
    s = moe.settings
    weights = {name: weight.double() for name, weight in moe.named_parameters()}
    x = x.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weights["norm.weight"]
    logits = x @ weights["router.weight"].T
    scores = logits.softmax(-1) if s.score == "softmax" else logits.sigmoid()
    capacity, taken = None, [0] * s.num_experts
    if s.capacity_factor:
        rows = x.shape[0] * x.shape[1] * s.experts_per_token
        capacity = -(-s.capacity_factor * rows // s.num_experts)
    out, chosen = torch.zeros_like(x), []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            experts = choices(moe, scores[b, t])
            total = sum(scores[b, t, e] for e in experts) if s.normalize else 1
            for e in experts:
                taken[e] += 1
                if capacity is None or taken[e] <= capacity:
                    weight = scores[b, t, e] / total * s.scale
                    y = swiglu(x[b, t], *weights["experts.gate_up"][e])
                    out[b, t] = out[b, t] + weight * (weights["experts.down"][e] @ y)
            chosen.append(experts)
    if s.shared_width:
        y = swiglu(x, weights["shared.gate.weight"], weights["shared.up.weight"])
        out = out + y @ weights["shared.down.weight"].T
    return out, chosen, losses(moe, logits, scores, chosen)


def swiglu(x, gate, up):
    return F.silu(x @ gate.T) * (x @ up.T)


def choices(moe, scores):
    """Return the experts of one token, the best first."""
    s = moe.settings
    scores = scores.detach() + (0 if moe.router.bias is None else moe.router.bias.double())
    scores = scores.tolist()
    size = s.num_experts // s.groups
    groups = [range(size * g, size * g + size) for g in range(s.groups)]
    best = 2 if s.group_score == "top2" else 1
    groups.sort(key=lambda g: -sum(sorted((scores[e] for e in g), reverse=True)[:best]))
    reach = [e for g in groups[: s.groups_per_token] for e in g]
    return sorted(reach, key=lambda e: -scores[e])[: s.experts_per_token]


def losses(moe, logits, scores, chosen):
    """Return the sum over sequences of what the router adds to the loss."""
    s, (batch, length, experts) = moe.settings, logits.shape
    total = s.z_weight * logits.exp().sum(-1).log().square().mean(1).sum()
    shares = scores / scores.sum(-1, keepdim=True)
    for b in range(batch if s.aux_weight else 0):
        rows = [e for each in chosen[b * length : (b + 1) * length] for e in each]
        for e in range(experts):
            load = rows.count(e) / (s.experts_per_token * length) * experts
            if moe.router.load is not None:
                load = moe.router.load[e]
            total = total + s.aux_weight * load * shares[b, :, e].mean()
    return total
