"""The weights that may multiply in narrow formats are those whose modules have a product."""

import pytest

from trainer.engine.core.registry import models
from trainer.engine.parallel.materialize import without_storage
from trainer.engine.precision.choose import matmul_weights
from trainer.kernels.choose import choose
from trainer.model_zoo.layers.dense import Linear
from trainer.model_zoo.layers.experts import Experts

SAMPLES = [
    (name, {"flavor": flavor} | more)
    for name in sorted(models)
    for flavor in models[name].flavors
    if "debug" in flavor
    for more in ([{}, {"mtp_depth": 1}] if name == "deepseek_v3" else [{}])
]


@pytest.mark.parametrize(("name", "settings"), SAMPLES, ids=str)
def test_what_may_multiply_is_what_has_a_product(name, settings):
    config = models[name].model_validate(settings).with_vocab(64)
    with without_storage():
        model = config.build(choose({}, "cpu", 64))
    inside = dict(model.get_submodule(config.layout.blocks).named_modules())
    expected = set()
    for path, module in inside.items():
        keys = {Linear: ["weight"]}.get(type(module), [])
        if isinstance(module, Experts):
            keys = ["gate_up", "down"]
        expected |= {f"{config.layout.blocks}.{path}.{key}" for key in keys}
    assert set(matmul_weights(config)) == expected
    assert expected
