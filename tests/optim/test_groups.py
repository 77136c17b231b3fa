import pytest
import torch
from pydantic import ValidationError
from torch import nn

from trainer.engine.core.errors import RecipeError
from trainer.engine.optim.optimizers import SGD, AdamW
from trainer.engine.optim.parameters import parameter_groups
from trainer.engine.optim.tables import ParameterGroup


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3)


def names_by_group(model, config):
    names = {weight: name for name, weight in model.named_parameters()}
    groups = parameter_groups(model.named_parameters(), config)
    return [{names[weight] for weight in group["params"]} for group in groups], groups


def test_first_match_wins_and_the_rest_keeps_the_defaults():
    config = AdamW(
        lr=1.0,
        groups=[
            ParameterGroup(match="norm.*", weight_decay=0.0),
            ParameterGroup(match="re:bias$", lr=0.5),
        ],
    )
    names, groups = names_by_group(Tiny(), config)
    assert names == [
        {"norm.weight", "norm.bias"},
        {"up.bias", "down.bias"},
        {"up.weight", "down.weight"},
    ]
    assert [group["peak_lr"] for group in groups] == [1.0, 0.5, 1.0]
    optimizer = config.build(groups, torch.device("cpu"))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1, 0.1]


def test_a_pattern_that_matches_nothing_is_an_error_naming_its_key():
    config = SGD(groups=[ParameterGroup(match="up.wieght"), ParameterGroup(match="nothing")])
    with pytest.raises(RecipeError) as caught:
        parameter_groups(Tiny().named_parameters(), config)
    text = caught.value.render()
    assert "optimizer.groups.0.match" in text
    assert "optimizer.groups.1.match" in text
    assert 'did you mean "up.weight"?' in text


def test_a_pattern_shadowed_by_an_earlier_one_is_an_error():
    config = SGD(groups=[ParameterGroup(match="*"), ParameterGroup(match="up.weight")])
    with pytest.raises(RecipeError, match="earlier groups"):
        parameter_groups(Tiny().named_parameters(), config)


def test_patterns_may_match_on_other_stages_of_a_pipeline_alone():
    config = SGD(
        lr=1.0,
        groups=[
            ParameterGroup(match="embed.weight", lr=0.5),
            ParameterGroup(match="re:^(norm|head)", lr=0.2),
        ],
    )
    remote = ["embed.weight", "head.weight"]
    groups = parameter_groups(Tiny().named_parameters(), config, remote)
    assert [(group["lr"], len(group["params"])) for group in groups] == [(0.2, 2), (1.0, 4)]
    with pytest.raises(RecipeError, match="matches no parameter"):
        parameter_groups(Tiny().named_parameters(), config, remote[1:])
    shadowed = SGD(groups=[ParameterGroup(match="e*"), ParameterGroup(match="embed.weight")])
    with pytest.raises(RecipeError, match="earlier groups"):
        parameter_groups(Tiny().named_parameters(), shadowed, remote)


def test_frozen_parameters_are_left_out():
    model = Tiny()
    model.up.weight.requires_grad_(False)
    names, _ = names_by_group(model, SGD())
    assert "up.weight" not in names[0]


def test_groups_scale_the_values_of_the_optimizer():
    config = AdamW(
        lr=0.4,
        weight_decay=0.3,
        groups=[
            ParameterGroup(match="norm.*", lr_scale=0.5, weight_decay_scale=0.0),
            ParameterGroup(match="up.*", weight_decay_scale=2.0),
        ],
    )
    optimizer = config.build(
        parameter_groups(Tiny().named_parameters(), config), torch.device("cpu")
    )
    found = [(group["peak_lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(0.2, 0.0), (0.4, 0.6), (0.4, 0.3)]
    assert "lr_scale" not in optimizer.param_groups[0]


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_value_and_its_scale_exclude_each_other(key):
    with pytest.raises(ValidationError, match="give one"):
        ParameterGroup(match="*", **{key: 0.1, f"{key}_scale": 2.0})
