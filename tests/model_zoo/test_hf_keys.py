"""`hf_keys.toml` against the installed transformers: complete, and right about each key."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from tests.model_zoo.peers import tokens
from trainer.engine.core.registry import models
from trainer.model_zoo.config import ModelConfig
from trainer.model_zoo.hf_settings import find_notes, known_keys
from trainer.model_zoo.sizes import SettingsError

TYPES = {
    kind: models[name] for name in models for kind in models[name].layout.hf_possible["model_type"]
}
SMALL = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 61}
VALUES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe": {"num_experts": 4}},
    "deepseek_v2": {
        "moe": {
            "score": "softmax",
            "balance_bias": False,
            "normalize": False,
            "num_shared": 1,
            "groups": 4,
            "groups_per_token": 2,
            "group_score": "max",
        }
    },
    "llama4_text": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8},
}
NEVER_READ = ("head_dim",)
"""keys of DeepSeek's that transformers computes from others"""


def config_of(kind: str) -> ModelConfig:
    return TYPES[kind].model_validate(SMALL | VALUES.get(kind, {}))


def class_fields(kind: str) -> dict[str, Any]:
    return {
        each.name: each.default for each in dataclasses.fields(type(AutoConfig.for_model(kind)))
    }


def changed(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 4
    return value / 2 + 0.25 if isinstance(value, float) else 3


@pytest.mark.parametrize("kind", TYPES)
def test_every_key_that_transformers_has_is_listed_with_its_default(kind: str) -> None:
    known, fields = known_keys(kind), class_fields(kind)
    assert known is not None
    unlisted = [key for key in fields if not known.lists(key)]
    inside = RopeParameters.__annotations__
    unlisted += [key for key in inside if not known.lists(f"rope_parameters.{key}")]
    assert unlisted == [], f"give these keys of {kind} a meaning in model_zoo/hf_keys.toml"
    theirs = AutoConfig.for_model(kind)
    for key, value in known.defaults.items():
        if key != "rope_theta" and key in fields:
            assert getattr(theirs, key) == value, key
    # Gemma 3 has a table for each kind of block.
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert rope["rope_theta"] == known.defaults["rope_theta"]
    assert known.rope.items() <= rope.items()
    for key in set(fields) & {*known.used} - {*known.defaults, *known.optional}:
        required = ("hidden_size", "num_", "vocab_size", "intermediate_size")
        by_rule = fields[key] is None or key.startswith(required)
        assert by_rule, f"{kind} takes {key} = {fields[key]} where it is left out"


@pytest.mark.parametrize("kind", TYPES)
def test_harmless_keys_change_no_logit_of_transformers(kind: str) -> None:
    known, fields = known_keys(kind), class_fields(kind)
    assert known is not None
    settings = config_of(kind).hf_config()
    harmless = {*known.harmless, *(each.key for each in known.noted)} & set(fields)
    base = {each.name for each in dataclasses.fields(PreTrainedConfig)}
    others = {key: changed(fields[key]) for key in harmless - base - {*NEVER_READ}}
    # An id beyond the small vocabulary would have no row.
    others |= {key: 3 for key in others if key.endswith("_token_id")}
    assert len(others) >= 5
    pair = []
    for change in ({}, others):
        config = AutoConfig.for_model(**{**settings, **change}, attn_implementation="eager")
        pair.append(AutoModelForCausalLM.from_config(config).eval())
    for weight in pair[0].parameters():
        torch.nn.init.normal_(weight, std=0.2)
    pair[1].load_state_dict(pair[0].state_dict())
    logits = [model(tokens()).logits for model in pair]
    assert torch.equal(*logits)
    notes = find_notes({**settings, **others})
    assert len(notes) == len(known.noted)
    assert find_notes(settings) == []


@pytest.mark.parametrize("kind", TYPES)
def test_another_value_of_a_used_key_gives_another_model_or_is_refused(kind: str) -> None:
    config, known = config_of(kind), known_keys(kind)
    assert known is not None
    settings = config.hf_config()
    given = config.from_hf_config(settings)
    tried = [key for key in known.used if isinstance(settings.get(key), int | float | list)]
    assert len(tried) >= 9
    for key in tried:
        value = settings[key]
        other = value[:-1] if isinstance(value, list) else changed(value)
        if key in ("architectures", "problem_type"):
            continue
        try:
            found = config.from_hf_config({**settings, key: other})
        except SettingsError:
            continue
        assert found.model_dump() != given.model_dump(), key


@pytest.mark.parametrize("kind", TYPES)
def test_a_key_that_is_not_done_is_refused_by_name(kind: str) -> None:
    config, known = config_of(kind), known_keys(kind)
    assert known is not None
    for each in known.refused:
        *table, key = each.key.split(".")
        other = "other" if isinstance(each.possible[0], str) else changed(each.possible[0])
        settings = config.hf_config()
        place = settings[table[0]] if table else settings
        place[key] = [other] if isinstance(each.possible[0], list) else other
        with pytest.raises(SettingsError, match=key) as raised:
            config.from_hf_config(settings)
        assert any(each.means in problem for problem in raised.value.problems), each.key


def test_keys_that_nothing_knows_are_told() -> None:
    settings = config_of("llama").hf_config()
    settings["rope_parameters"]["spin"] = 2
    [note] = find_notes({**settings, "logit_scale": 0.5})
    assert note.endswith('ignored: ["logit_scale", "rope_parameters.spin"]')
