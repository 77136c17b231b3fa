"""A plugin: an MLP-mixer that tells drawn shapes apart, on data that it draws itself.

The mixer is that of Tolstikhin et al. 2021, arXiv:2105.01601.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ...plugins import DatasetSource, Model, ModelConfig, models, sources

SIZE, CLASSES = 16, 4


class Shapes:
    """Noisy images, [16, 16] in fp32, of a disc, a square, a cross or a ring."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = np.random.default_rng([self.seed, index])
        label, radius = int(draw.integers(CLASSES)), draw.uniform(3, 5)
        x, y = np.mgrid[:SIZE, :SIZE] - draw.uniform(6, 9, (2, 1, 1))
        far, near = np.maximum(abs(x), abs(y)), np.minimum(abs(x), abs(y))
        round_ = np.hypot(x, y)
        inside = [
            round_ < radius,
            far < 0.89 * radius,
            (near < 1.2) & (far < radius),
            abs(round_ - radius) < 1,
        ][label]
        image = inside + draw.normal(0, 0.3, inside.shape)
        return {"image": image.astype(np.float32), "labels": label}


@sources.register
class ShapesSource(DatasetSource):
    """Drawn shapes."""

    name: Literal["shapes"] = "shapes"
    count: int = 2000
    """number of images of the training split; the validation split has a quarter"""
    seed: int = 0
    """images of another seed are others"""

    def build(self, split: str) -> Shapes:
        """Return the images of a split."""
        held_out = split == "validation"
        return Shapes(self.count // 4 if held_out else self.count, 2 * self.seed + held_out)


class MixerBlock(nn.Module):
    """Mixes the patches, then the channels."""

    def __init__(self, patches: int, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.patches = nn.Sequential(nn.Linear(patches, dim), nn.GELU(), nn.Linear(dim, patches))
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, patches, dim] to the same shape."""
        x = x + self.patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class Mixer(Model):
    """An MLP-mixer and a linear layer on the mean over patches."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, dim)
        self.blocks = nn.Sequential(*(MixerBlock(16, dim) for _ in range(depth)))
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return scores, [B, 4], of images, [B, 16, 16]."""
        patches = image.unfold(1, 4, 4).unfold(2, 4, 4).flatten(3).flatten(1, 2)
        return self.head(self.blocks(self.embed(patches)).mean(1))


@models.register
class MixerConfig(ModelConfig):
    """An MLP-mixer of patches of 4 x 4."""

    name: Literal["mixer"] = "mixer"
    dim: int = 48
    """channels"""
    depth: int = 3
    """blocks"""

    def build(self, kernels: Any) -> Mixer:
        """Return the module; it needs no kernels."""
        return Mixer(self.dim, self.depth)
