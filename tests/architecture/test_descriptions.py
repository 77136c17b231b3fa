"""What users read in `trainer list` is there, for every component and every key."""

import pytest

from trainer.engine.recipe.documents.describe import describe, summary
from trainer.engine.recipe.documents.reference import tables
from trainer.engine.recipe.schema import REGISTRIES

CONFIGS = {
    **{f"table {name}": table for name, table in tables().items()},
    **{
        f"{kind} {name}": registry[name]
        for kind, registry in REGISTRIES.items()
        for name in registry
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_component_says_what_it_is_in_one_sentence(name):
    text = summary(CONFIGS[name])
    assert text.endswith(".")
    assert "\n" not in text


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_described(name):
    bare = [
        field.key
        for field in describe(CONFIGS[name])
        if field.key != "name" and not field.description.strip()
    ]
    assert bare == []
