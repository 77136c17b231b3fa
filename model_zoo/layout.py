"""Tables keyed by parameter names: where modules are, and what others call them. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One of the tensors in which a parameter is stored elsewhere.

    Attributes:
        ours: name of our parameter, with the index of the part, for messages.
        name: name of the tensor in the other files.
        start: index in our parameter at which the part begins.
        shape: shape of that tensor; our parameter may have more dims of size 1 in front.
        form: see `Layout.hf_forms`; empty for a part that is not the whole parameter.
        inside: of a part that is rows of a larger tensor, the first row and that tensor's shape.
    """

    ours: str
    name: str
    start: Shape
    shape: Shape
    form: tuple[str, ...] = ()
    inside: tuple[int, Shape] | None = None

    @property
    def stored_shape(self) -> Shape:
        """The shape of the tensor that it is in."""
        return self.inside[1] if self.inside else self.shape


@dataclass(frozen=True)
class Layout:
    """Where a family's modules are, how they are split, and what other libraries call them.

    Args:
        embed: path of the token embedding module; empty: there is none.
        blocks: path of the `ModuleList` of repeated blocks: the units that FSDP, recomputation and
            compilation wrap, and between which a pipeline may cut; empty: there is none, and the
            whole model is the unit.
        head: path of the module with final norm and projection; empty: there is none.
        tensor: parameter name -> how tensor parallelism splits it and what enters and leaves its
            module: "columns", "rows", "key_value", "heads": a number for each query head, "norm",
            "vocabulary", "whole": each rank has all of it, and applies it to its own part, or
            "repeated": each rank applies it to the same positions.
        context: whether positions meet in the kernels' attention alone, so that ranks can share a
            sequence.
        pipeline: whether `forward` computes some of the blocks alone.
        gathered: paths inside a block of modules that have no norm of style "norm": tensor ranks
            gather the sequence of what enters them, and not of what leaves a norm.
        experts: path inside a block of the module whose parameters have a row for each expert;
            empty: there is none.
        hf_names: our parameter name -> Hugging Face's; `{i}` stands for a block's number.
        hf_stacks: our parameter [E, ..., rows, columns] -> Hugging Face's names of the matrices
            that it is made of; `{j}` stands for a number below E, and there is one name for each
            matrix of that number. A folder may hold the parameter as one tensor too, by its name in
            `hf_names`.
        hf_copies: endings of names under which a folder may hold once more what others hold.
        hf_forms: our parameter [E, ...] -> what makes Hugging Face's of it: dims 1 and 2 of [E, 2,
            F, ...] become one, "joined" as they are, or "interleaved", in turns of the two;
            "transposed" then swaps dims 1 and 2.
        hf_modules: part of the path of a tensor in files -> what transformers' modules call it.
        peft_swaps: whether PEFT takes the columns of Hugging Face's experts for rows.
        hf_keys: key of Hugging Face's config.json (dots for nesting) -> key of ours, for what must
            agree if weights shall mean the same.
        hf_possible: key of config.json -> the values that the family can compute: its model types,
            and of a plugin's family what else is refused. Of the others `hf_keys.toml` says it.
        hf_follow: keys of config.json that say once more what others say: with another value the
            model would be one that the family cannot compute.
        hf_also: key of config.json -> key of ours, for what is read from there but may differ.
    """

    embed: str = ""
    blocks: str = ""
    head: str = ""
    tensor: Mapping[str, str] = field(default_factory=dict)
    context: bool = False
    pipeline: bool = False
    gathered: tuple[str, ...] = ()
    experts: str = ""
    hf_names: Mapping[str, str] = field(default_factory=dict)
    hf_stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hf_copies: tuple[str, ...] = ()
    hf_forms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hf_modules: Mapping[str, str] = field(default_factory=dict)
    peft_swaps: bool = False
    hf_keys: Mapping[str, str] = field(default_factory=dict)
    hf_possible: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    hf_follow: tuple[str, ...] = ()
    hf_also: Mapping[str, str] = field(default_factory=dict)

    def find_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated blocks that a model has on this rank, in order; [] without any."""
        return list(model.get_submodule(self.blocks).children()) if self.blocks else []

    def is_expert(self, name: str) -> bool:
        """Return whether a parameter has a row for each expert."""
        return bool(self.experts) and f".{self.experts}." in name

    def to_hf(self, name: str) -> str | None:
        """Return Hugging Face's name of our parameter, or None where the table has none."""
        return translate(name, self.hf_names)

    def hf_form(self, name: str) -> tuple[str, ...]:
        """Return how Hugging Face's layout of our parameter differs; see `hf_forms`."""
        return (_lookup(name, self.hf_forms) or ("", ()))[1]

    def hf_parts(self, name: str, shape: Shape, stored: Container[str] = ()) -> list[Part]:
        """Return the tensors in which Hugging Face stores our parameter; none: it has no name.

        Args:
            name: name of our parameter.
            shape: shape of our parameter.
            stored: names of the tensors that the folder is known to hold.
        """
        whole = self.to_hf(name)
        stack = _lookup(name, self.hf_stacks)
        if stack is None or whole in stored:
            form = self.hf_form(name)
            theirs = _formed(shape, form)
            return [Part(name, whole, (0,) * len(shape), theirs, form)] if whole else []
        number, templates = stack
        # The last dim runs fastest, so gate and up take turns as the templates do.
        places = product(*map(range, shape[:-2]))
        return [
            Part(
                f"{name}[{', '.join(map(str, place))}]",
                template.replace("{i}", number).replace("{j}", str(place[0])),
                (*place, 0, 0),
                shape[-2:],
            )
            for place, template in zip(places, cycle(templates))
        ]

    def from_hf(self, name: str) -> str | None:
        """Return our name of a Hugging Face parameter, or None where the table has none."""
        return translate(name, {theirs: ours for ours, theirs in self.hf_names.items()})


def _formed(shape: Shape, form: Sequence[str]) -> Shape:
    """Return what `Layout.hf_forms` makes of a shape."""
    if "joined" in form or "interleaved" in form:
        shape = (shape[0], shape[1] * shape[2], *shape[3:])
    return (shape[0], shape[2], shape[1]) if "transposed" in form else shape


def translate(name: str, table: Mapping[str, str]) -> str | None:
    """Return what a table calls a name; `{i}` in it stands for a block's number."""
    match = _lookup(name, table)
    return match and match[1].replace("{i}", match[0])


def _lookup(name: str, table: Mapping[str, T]) -> tuple[str, T] | None:
    """Return the block's number in a name and the table's entry for the name, or None."""
    number = re.search(r"\.(\d+)\.", name)
    # Once: the block's number comes first, and an expert's may follow.
    template = re.sub(r"\.\d+\.", ".{i}.", name, count=1)
    value = table.get(template)
    return None if value is None else (number[1] if number else "", value)


ENDS_TENSOR = {
    "embed.weight": "vocabulary",
    "head.norm.weight": "norm",
    "head.proj.weight": "columns",
    "head.score.weight": "repeated",
    "head.score.bias": "repeated",
    "head.qa_outputs.weight": "repeated",
    "head.qa_outputs.bias": "repeated",
}
ATTENTION_TENSOR = {
    "layers.{i}.attention.norm.weight": "norm",
    "layers.{i}.attention.q.weight": "columns",
    "layers.{i}.attention.k.weight": "key_value",
    "layers.{i}.attention.v.weight": "key_value",
    "layers.{i}.attention.o.weight": "rows",
}
QKV_BIASES_TENSOR = {
    "layers.{i}.attention.q.bias": "columns",
    "layers.{i}.attention.k.bias": "key_value",
    "layers.{i}.attention.v.bias": "key_value",
}
QK_NORM_TENSOR = {
    "layers.{i}.attention.q_norm.weight": "whole",
    "layers.{i}.attention.k_norm.weight": "whole",
}
POST_NORM_TENSOR = {
    "layers.{i}.attention.post_norm.weight": "whole",
    "layers.{i}.mlp.post_norm.weight": "whole",
}
"""each rank normalises its part of the sequence"""
MLP_TENSOR = {
    "layers.{i}.mlp.norm.weight": "norm",
    "layers.{i}.mlp.gate.weight": "columns",
    "layers.{i}.mlp.up.weight": "columns",
    "layers.{i}.mlp.down.weight": "rows",
}
MOE_TENSOR = {
    "layers.{i}.mlp.norm.weight": "norm",
    "layers.{i}.mlp.router.weight": "whole",
    "layers.{i}.mlp.shared.gate.weight": "whole",
    "layers.{i}.mlp.shared.up.weight": "whole",
    "layers.{i}.mlp.shared.down.weight": "whole",
}
ENDS_HF = {
    "embed.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.proj.weight": "lm_head.weight",
    "head.score.weight": "score.weight",
    "head.score.bias": "score.bias",
    "head.qa_outputs.weight": "qa_outputs.weight",
    "head.qa_outputs.bias": "qa_outputs.bias",
}
ATTENTION_HF = {
    "layers.{i}.attention.norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.o.weight": "model.layers.{i}.self_attn.o_proj.weight",
}
QKV_BIASES_HF = {
    "layers.{i}.attention.q.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.attention.k.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.attention.v.bias": "model.layers.{i}.self_attn.v_proj.bias",
}
QK_NORM_HF = {
    "layers.{i}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
}
MLP_HF = {
    "layers.{i}.mlp.norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
}
EXPERTS_HF = {
    "layers.{i}.mlp.router.weight": "model.layers.{i}.mlp.gate.weight",
    "layers.{i}.mlp.experts.gate_up": "model.layers.{i}.mlp.experts.gate_up_proj",
    "layers.{i}.mlp.experts.down": "model.layers.{i}.mlp.experts.down_proj",
}
EXPERTS_STACKS = {
    "layers.{i}.mlp.experts.gate_up": (
        "model.layers.{i}.mlp.experts.{j}.gate_proj.weight",
        "model.layers.{i}.mlp.experts.{j}.up_proj.weight",
    ),
    "layers.{i}.mlp.experts.down": ("model.layers.{i}.mlp.experts.{j}.down_proj.weight",),
}
"""as models are published, and as transformers saves them"""
EXPERTS_FORMS = {"layers.{i}.mlp.experts.gate_up": ("joined",)}
"""where all experts are in one tensor"""
HF_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "rope_parameters.rope_theta": "rope_theta",
}
GROUPED_QUERY_KEYS = {"num_key_value_heads": "n_kv_heads", "head_dim": "head_dim"}
HF_ALSO = {
    "max_position_embeddings": "max_seq_len",
    "tie_word_embeddings": "tie_embeddings",
}


def is_load(name: str) -> bool:
    """Return whether a name is that of a router's `load`, which is saved and is no weight.

    No Hugging Face model has one; where there is none, it starts again.
    """
    return name.endswith(".router.load")
