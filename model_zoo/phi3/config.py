"""Phi-3's and Phi-4's sizes (arXiv:2404.14219, section 2; later ones: config.json). Torch-free."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..grouped_query_config import GroupedQueryConfig
from ..layers.rope_scaling import LONGROPE_KEYS, LongRopeScaling
from ..layout import (
    ATTENTION_HF,
    ATTENTION_TENSOR,
    ENDS_HF,
    ENDS_TENSOR,
    GROUPED_QUERY_KEYS,
    HF_ALSO,
    HF_KEYS,
    MLP_HF,
    MLP_TENSOR,
    Layout,
    Part,
    Shape,
)
from ..sizes import Size

OLD_TYPES = ("su", "yarn")
"""what early files call LongRoPE"""
QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
FUSED = {
    QKV: ("attention.q.weight", "attention.k.weight", "attention.v.weight"),
    GATE_UP: ("mlp.gate.weight", "mlp.up.weight"),
}
"""tensor in Hugging Face's blocks -> our parameters, whose rows it holds one after the other"""
FUSED_HF = {
    f"layers.{{i}}.{name}": f"model.layers.{{i}}.{theirs}"
    for theirs, names in FUSED.items()
    for name in names
}

LAYOUT = Layout(
    embed="embed",
    blocks="layers",
    head="head",
    tensor={**ENDS_TENSOR, **ATTENTION_TENSOR, **MLP_TENSOR},
    context=True,
    pipeline=True,
    hf_names={**ENDS_HF, **ATTENTION_HF, **MLP_HF, **FUSED_HF},
    hf_keys={
        **HF_KEYS,
        **GROUPED_QUERY_KEYS,
        "intermediate_size": "ffn_dim",
        "sliding_window": "window",
        "rope_parameters.partial_rotary_factor": "rotary_fraction",
        **LONGROPE_KEYS,
    },
    hf_possible={"model_type": ("phi3",)},
    hf_also=HF_ALSO,
)


MINI = {
    "dim": 3072,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "ffn_dim": 8192,
    "vocab_size": 32064,
}
MEDIUM = {"dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 10, "ffn_dim": 17920}
SHORT_ROWS = {"window": 2047, "max_seq_len": 4096}
# fmt: off
MINI_4_LONG = [
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]
# fmt: on


class Phi3Config(GroupedQueryConfig):
    """Phi-3 and Phi-4: Llama's blocks, in a window or with LongRoPE; part of a head is rotated."""

    layout: ClassVar = LAYOUT
    hf_class: ClassVar = "Phi3"
    hf_heads: ClassVar = ("sequence_classification", "token_classification")
    flavors: ClassVar = {
        "debug": {},
        "3-mini-4k": {**MINI, **SHORT_ROWS},
        "3-medium-4k": {**MEDIUM, **SHORT_ROWS, "vocab_size": 32064},
        "4-mini": {
            **MINI,
            "n_heads": 24,
            "n_kv_heads": 8,
            "vocab_size": 200064,
            "tie_embeddings": True,
            "rotary_fraction": 0.75,
            "rope_scaling": {"short_factor": [1.0] * 48, "long_factor": MINI_4_LONG},
            "max_seq_len": 131072,
        },
        "4": {**MEDIUM, "vocab_size": 100352, "rope_theta": 250000.0, "max_seq_len": 16384},
    }

    name: Literal["phi3"] = "phi3"
    ffn_dim: Size = 192
    """width inside the feed-forward layer"""
    window: Size | None = None
    """positions that a block sees, its own the last; none: the whole row"""
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """how much of each head the rotary embedding rotates, from its start"""
    rope_scaling: LongRopeScaling | None = None
    """division of the rotary frequencies; none leaves them alone"""

    @property
    def rotary_width(self) -> int:
        """How many numbers of each head are rotated."""
        return int(self.head_width * self.rotary_fraction)

    @model_validator(mode="after")
    def _check_rotation(self) -> Self:
        width = self.rotary_width
        if width % 2 or not width:
            raise ValueError(f"rotary_fraction rotates {width} numbers of a head: RoPE turns pairs")
        counts = {} if self.rope_scaling is None else self.rope_scaling.counts
        wrong = {key: count for key, count in counts.items() if count != width // 2}
        if wrong:
            said = " and ".join(f"{key} has {count}" for key, count in wrong.items())
            raise ValueError(f"rope_scaling needs {width // 2} numbers, one a pair: {said}")
        return self

    def unsupported_length(self, seq_len: int) -> str:
        """Return why rows of a length are not what the rotary factors are for; empty: they are."""
        scaling = self.rope_scaling
        if scaling is None or scaling.use_long or seq_len <= scaling.original_max_seq_len:
            return ""
        return (
            f"seq_len ({seq_len}) is over model.rope_scaling.original_max_seq_len "
            f"({scaling.original_max_seq_len}), up to which short_factor is"
        )

    def hf_parts(self, name: str, shape: Shape, stored: Container[str] = ()) -> list[Part]:
        """Return the tensor that holds a parameter: of some, rows of one for several."""
        parts = super().hf_parts(name, shape, stored)
        for names in FUSED.values():
            if (inside := name.split(".", 2)[-1]) in names:
                rows = [self.block_shapes(0)[each][0] for each in names]
                first = sum(rows[: names.index(inside)])
                return [replace(parts[0], inside=(first, (sum(rows), *shape[1:])))]
        return parts

    def hf_name(self, name: str) -> str | None:
        """Return Hugging Face's name of a parameter; None for one that is rows of a tensor."""
        theirs = super().hf_name(name)
        return None if theirs and theirs.endswith((QKV, GATE_UP)) else theirs

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `Phi3Config` says of this model."""
        found, scaling = super().hf_config(), self.rope_scaling
        del found["attention_bias"]  # no key of transformers' class
        original = {}
        if scaling is not None:
            original = {"original_max_position_embeddings": scaling.original_max_seq_len}
        return {
            "model_type": "phi3",
            **found,
            **original,
            "partial_rotary_factor": self.rotary_fraction,
            "intermediate_size": self.ffn_dim,
            "sliding_window": self.window,
            # Else transformers takes token 32000, whose embedding it would not train.
            "pad_token_id": None,
        }

    @classmethod
    def flatten_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json as transformers' model of this family understands it."""
        given = dict(settings)
        for key in ("rope_scaling", "rope_parameters"):
            rope = given.get(key)
            if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in OLD_TYPES:
                given[key] = {**rope, "rope_type": "longrope"}
        return super().flatten_hf(given)
