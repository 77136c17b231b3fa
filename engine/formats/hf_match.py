"""Compares the names, shapes and settings of a Hugging Face folder with a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...model_zoo.config import ModelConfig
from ...model_zoo.heads import is_head_layer, read_head
from ...model_zoo.hf_settings import (
    agree,
    find_mismatches,
    find_notes,
    find_unsupported,
    known_keys_of,
)
from ...model_zoo.layout import Layout, Part
from ...model_zoo.sizes import SettingsError
from ...model_zoo.sizes import quote as text
from ..checkpoint.tensors import DTYPES, TensorRows, differs
from ..core.errors import nearest
from ..core.text.display import MAX_SHOWN, quote_name
from .hf_folder import CONFIG, StoredTensor
from .hf_layout import open_parameter, open_stored_tensor

COMPUTED = ".rotary_emb.inv_freq"
"""suffix of a rotary buffer that old versions of transformers saved and every model recomputes"""

Shape = tuple[int, ...]


@dataclass
class Match:
    """The result of comparing a Hugging Face folder with a model.

    Attributes:
        sources: the Hugging Face tensors of each parameter, by our parameter name.
        problems: one sentence for each mismatch; empty if the folder fits.
        notes: sentences that the user should read although the folder fits.
        hint: the change that would resolve the problems, or an empty string.
    """

    sources: dict[str, list[Part]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hint: str = ""

    @property
    def parts(self) -> list[Part]:
        """All Hugging Face tensors that the parameters are read from."""
        return [part for parts in self.sources.values() for part in parts]

    def rows(
        self, shapes: Mapping[str, Shape], stored: Mapping[str, StoredTensor]
    ) -> dict[str, TensorRows]:
        """Return a lazy reader for each of our parameters.

        Args:
            shapes: the shape of each parameter to read, by our names.
            stored: the tensors of the folder, by Hugging Face's names.
        """
        regions = {part.name: open_stored_tensor(stored[part.name]) for part in self.parts}
        return {
            name: open_parameter(parts, tuple(shapes[name]), regions)
            for name, parts in self.sources.items()
            if name in shapes
        }


def match(
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, Shape],
    config: ModelConfig,
    settings: Mapping[str, Any] | None,
    place: str = "the folder",
    *,
    fresh_head: bool = False,
) -> Match:
    """Compare stored tensors and config.json with the parameters of a model.

    Args:
        stored: the tensors of the folder, by Hugging Face's names.
        shapes: the shape of each parameter, by our names.
        config: the config of the model.
        settings: the content of config.json; None if there is no such file.
        place: the name of the tensors' location in messages.
        fresh_head: whether the layer of a task's head may be missing: it keeps its values then.
    """
    layout, match = config.layout, Match()
    if not layout.hf_names:
        match.problems.append(f'model "{config.name}" has no table of Hugging Face names')
        return match
    if settings is not None:
        match.problems, match.hint = _compare_settings(settings, config)
        match.notes += find_notes(settings)
    embed, head = _tied_names(layout)
    layer = [name for name in shapes if is_head_layer(name)]
    if fresh_head and layer and not any(layout.to_hf(name) in stored for name in layer):
        match.notes.append(f"{place} holds no {', '.join(layer)}: new ones are trained")
        shapes = {name: shape for name, shape in shapes.items() if name not in layer}
    # Without config.json's word, a missing projection is taken for a tied one.
    tied_there = (settings or {}).get("tie_word_embeddings", True)
    for name, shape in shapes.items():
        parts = config.hf_parts(name, tuple(shape), stored)
        if not parts:
            match.problems.append(f'{name}: model "{config.name}" has no Hugging Face name for it')
            continue
        if parts[0].name == head and head not in stored and embed in stored and tied_there:
            match.notes.append(f"{head} is not in {place}: {name} starts as the embedding")
            parts = [replace(parts[0], name=embed)]
        match.sources[name] = parts
    passed_over = (COMPUTED, *layout.hf_copies)
    extra = {head, *(name for name in stored if name.endswith(passed_over))}
    for name, shape in config.replaced_parameters.items():
        extra |= {part.name for part in config.hf_parts(name, shape, stored)}
    if further := config.hf_further_blocks(settings or {}):
        extra |= {name for name in stored if name.startswith(further)}
    if replaced := config.replaced_prefixes:
        extra |= {name for name in stored if (layout.from_hf(name) or "").startswith(replaced)}
    found = {name: tensor.shape for name, tensor in stored.items()}
    names = {part.ours: part.name for part in match.parts}
    wanted = {part.ours: part.stored_shape for part in match.parts}
    match.problems += list_mismatches(names, wanted, found, place, extra)
    match.problems += _list_unreadable_dtypes(match.sources, stored)
    return match


def _list_unreadable_dtypes(
    sources: Mapping[str, list[Part]], stored: Mapping[str, StoredTensor]
) -> list[str]:
    """Return a sentence for each unsupported dtype and each parameter stored in several dtypes."""
    problems = []
    for name, parts in sources.items():
        there = [part.name for part in parts if part.name in stored]
        odd = [theirs for theirs in there if stored[theirs].dtype not in DTYPES]
        problems += [
            f"{theirs} is stored as {stored[theirs].dtype}: quantized weights are not read"
            for theirs in odd
        ]
        dtypes = {stored[theirs].dtype for theirs in there}
        if not odd and len(dtypes) > 1:
            problems.append(f"{name} is stored in several dtypes: {', '.join(sorted(dtypes))}")
    return problems


def list_mismatches(
    sources: Mapping[str, str],
    shapes: Mapping[str, Shape],
    found: Mapping[str, Shape],
    place: str,
    extra: Collection[str] = (),
) -> list[str]:
    """Return a sentence for each tensor that is missing, unexpected or of another shape.

    Args:
        sources: the stored name of each parameter, by our parameter name.
        shapes: the shape that each parameter must have, by our parameter name.
        found: the shape of each stored tensor, by stored name.
        place: the name of the tensors' location in messages, such as "the folder".
        extra: stored names that are allowed although no parameter is read from them.
    """
    problems: list[str] = []
    known = {*sources.values(), *extra}
    unexpected = [name for name in found if name not in known]
    for name, theirs in sources.items():
        also = f" ({name} here)" if theirs != name else ""
        if theirs not in found:
            near = nearest(theirs, unexpected) if len(problems) < MAX_SHOWN else ""
            sentence = f"{quote_name(theirs)}{also} is not in {place}"
            problems.append(f"{sentence}; {near}" if near else sentence)
        elif tuple(found[theirs]) != tuple(shapes[name]):
            there, here = list(found[theirs]), list(shapes[name])
            ours = f" ({name})" if also else ""
            problems.append(f"{quote_name(theirs)} is {there} there and {here} here{ours}")
    return problems + [f"{quote_name(n)} is in {place} but not in the model" for n in unexpected]


def _compare_settings(settings: Mapping[str, Any], config: ModelConfig) -> tuple[list[str], str]:
    """Return the differences between config.json and a model, and a hint that resolves them.

    The hint is empty where neither keys of `[model]` nor another library would help.
    """
    layout = config.layout
    expected = config.hf_config()
    if not settings.get("model_type") and "model_type" in expected:
        # Without a type, keys mean what they mean for the one that is expected.
        settings = {**settings, "model_type": expected["model_type"]}
    there, here = config.flatten_hf(settings), config.flatten_hf(expected)
    not_done = find_unsupported(there, config.name, layout)
    nullable = known_keys_of(there).nullable
    differing = [
        (ours, here.get(key), there.get(key), "says" if key.split(".")[0] in settings else "means")
        for key, ours in layout.hf_keys.items()
        if (there.get(key) is not None or key in nullable)
        and not agree(there.get(key), here.get(key))
    ]
    problems = not_done + _compare_labels(settings, config)
    problems += [
        f"model.{ours} is {'not set' if own is None else text(own)}, {CONFIG} {said} {text(value)}"
        for ours, own, value, said in differing
    ]
    if not_done:
        return problems, "what no model here computes needs another library, such as transformers"
    if len(problems) > len(differing) or not differing:
        return problems or find_mismatches(there, here, config.name, layout), ""
    wanted = ", ".join(f"{ours} = {text(value)}" for ours, _, value, _ in differing)
    return problems, f"set in [model]: {wanted}"


def _compare_labels(settings: Mapping[str, Any], config: ModelConfig) -> list[str]:
    """Return a sentence if both have names for the outputs of one head, and they differ."""
    try:
        there, here = read_head(settings), config.task_head
    except SettingsError as error:
        return error.problems
    if here is None or there is None or here.kind != there.kind:
        return []
    if not (here.labels and there.labels) or here.labels == there.labels:
        return []
    return [f"the labels are {text(here.labels)}, {CONFIG} says {text(there.labels)}"]


def _tied_names(layout: Layout) -> tuple[str, str]:
    """Return Hugging Face's names of the embedding weight and of the output projection weight."""
    embed = layout.to_hf(f"{layout.embed}.weight")
    head = layout.to_hf(f"{layout.head}.proj.weight")
    return embed or "", head or ""


def compare_tied_weights(
    stored: Mapping[str, StoredTensor], match: Match, config: ModelConfig
) -> list[str]:
    """Check that a stored output projection equals the embedding if the model ties the two.

    Returns:
        One sentence if the two stored weights differ, else nothing.
    """
    embed, head = _tied_names(config.layout)
    if not config.is_tied or head not in stored or any(p.name == head for p in match.parts):
        return []
    one, other = stored[embed], stored[head]
    dtype = DTYPES.get(other.dtype)
    if dtype and not differs(open_stored_tensor(other), open_stored_tensor(one), dtype):
        return []
    return [f"{head} is there and differs from {embed}; the model has one weight for both"]
