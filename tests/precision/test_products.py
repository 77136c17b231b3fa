"""Products in narrow formats against the same products of rounded operands in fp64."""

import sys

import pytest
import torch

from trainer.engine.assemble.build import build_model
from trainer.engine.core.errors import EnvironmentFault
from trainer.engine.core.extras import install_command
from trainer.engine.parallel.plan import make_plan
from trainer.engine.parallel.tables import Parallel
from trainer.engine.precision.products import make_product
from trainer.engine.precision.tables import MX, Float8
from trainer.engine.recipe.schema import Recipe
from trainer.kernels.choose import choose
from trainer.model_zoo.layers.configs import MoESettings
from trainer.model_zoo.layers.experts import Experts

ROWS, IN, OUT = 64, 96, 32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")


def scaled(x, largest, dtype, power):
    """Return x in fp64, rounded to a format whose largest value becomes that of each group."""
    scale = torch.finfo(dtype).max / largest.double().clamp(min=1e-12)
    if power:
        scale = torch.exp2(scale.log2().floor())
    return (x.double() * scale).float().to(dtype).double() / scale


def rounded(x, dim=None, dtype=E4M3, *, power=False, block=None):
    """Return x in fp64 as a format has it: a scale for all, along a dim, or for blocks of it."""
    if dim is None:
        return scaled(x, x.abs().max(), dtype, power)
    if block is None:
        return scaled(x, x.abs().amax(dim, keepdim=True), dtype, power)
    parts = x.movedim(dim, -1).unflatten(-1, (-1, block))
    found = scaled(parts, parts.abs().amax(-1, keepdim=True), dtype, True)
    return found.flatten(-2).movedim(-1, dim)


def tensorwise(x, w, g):
    x8, w8, g8 = rounded(x), rounded(w), rounded(g, dtype=E5M2)
    return x8 @ w8.T, g8 @ w8, g8.T @ x8


def rowwise(x, w, g):
    def along(each, dim):
        return rounded(each, dim, power=True)

    grad_w = along(g, 0).T @ along(x, 0)
    return along(x, 1) @ along(w, 1).T, along(g, 1) @ along(w, 0), grad_w


def rowwise_with_gw_hp(x, w, g):
    y, _, _ = rowwise(x, w, g)
    return y, rounded(g, 1, power=True) @ rounded(w, power=True), g.double().T @ x.double()


def mxfp8_rceil(x, w, g):
    def along(each, dim):
        return rounded(each, dim, block=32)

    grad_w = along(g, 0).T @ along(x, 0)
    return along(x, 1) @ along(w, 1).T, along(g, 1) @ along(w, 0), grad_w


def mxfp8_rceil_wgrad_with_hp(x, w, g):
    y, grad_x, _ = mxfp8_rceil(x, w, g)
    return y, grad_x, g.double().T @ x.double()


FORMULAS = {
    Float8: [tensorwise, rowwise, rowwise_with_gw_hp],
    MX: [mxfp8_rceil, mxfp8_rceil_wgrad_with_hp],
}
CASES = [(kind, formula, True) for kind, formulas in FORMULAS.items() for formula in formulas]
# torch's own products of float8 run on CPUs too.
CASES += [(Float8, formula, False) for formula in FORMULAS[Float8]]


def operands():
    torch.manual_seed(0)
    x, w, g = (torch.randn(shape) for shape in ((ROWS, IN), (OUT, IN), (ROWS, OUT)))
    x[:, 7] *= 50  # a channel that stands out, as activations have
    return x, w, g * torch.logspace(-3, 1, ROWS).unsqueeze(1)


def distance(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(
    ("kind", "formula", "emulate"), CASES, ids=[f"{c[1].__name__}-{c[2]}" for c in CASES]
)
def test_a_projection_and_its_gradients_are_those_of_rounded_operands(kind, formula, emulate):
    pytest.importorskip("torchao")
    product = make_product(kind(enabled=True, emulate=emulate, recipe=formula.__name__))
    x, w, g = operands()
    x.requires_grad_()
    w.requires_grad_()
    bias = torch.randn(OUT, requires_grad=True)
    # As in a model: rows have more than one dim before the last.
    y = product(x.view(4, -1, IN), w, bias)
    y.backward(g.view(4, -1, OUT))
    found = (y.flatten(0, 1) - bias, x.grad, w.grad)
    exact = (x.double() @ w.double().T, g.double() @ w.double(), g.double().T @ x.double())
    wanted = formula(*(each.detach() for each in (x, w, g)))
    for ours, theirs, without in zip(found, wanted, exact, strict=True):
        assert distance(ours, theirs) < 2e-3
        # e4m3 rounds by 2^-4 of a value at most, e5m2 by 2^-3.
        assert distance(ours, without) < 0.08
    assert distance(found[0], exact[0]) > 1e-2
    assert (distance(found[2], exact[2]) < 1e-6) == ("hp" in formula.__name__)
    assert torch.allclose(bias.grad, g.sum(0), rtol=1e-5)


def test_experts_in_float8_are_near_the_layer_in_fp64():
    from trainer.kernels.grouped_gemm_fp8.op import grouped_linear_fp8

    settings = MoESettings(num_experts=3, experts_per_token=1, normalize=False, expert_ffn_dim=128)
    torch.manual_seed(0)
    layer = Experts(256, settings, choose({}, "cpu", 64))
    rows, weight = torch.randn(40, 256), torch.rand(40)
    offs = torch.tensor([25, 25, 40], dtype=torch.int32)
    grad = torch.randn(40, 256)

    def results(layer, dtype):
        layer.to(dtype).zero_grad()
        x = rows.to(dtype, copy=True).requires_grad_()
        y = layer(x, weight.to(dtype), offs)
        y.backward(grad.to(dtype))
        return [y.detach(), x.grad, *(each.grad for each in layer.parameters())]

    exact = [each.clone() for each in results(layer, torch.float64)]
    layer.product = grouped_linear_fp8
    for found, wanted in zip(results(layer, torch.float32), exact, strict=True):
        assert 5e-3 < distance(found, wanted) < 0.08
    assert not exact[2][1].any(), "an expert without rows"


def built(narrow, **model):
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64}
    values = {"run": {"steps": 1}, "model": sizes | model, "precision": narrow}
    recipe = Recipe.model_validate(values)
    return build_model(recipe, 64, CPU, make_plan(Parallel(), 0, 1, CPU))


def test_exactly_the_weights_that_patterns_name_multiply_in_a_format():
    pytest.importorskip("torchao")
    float8 = {"enabled": True, "emulate": True, "targets": ["layers.0.*"]}
    float8["exclude"] = ["*.attention.[kv].weight"]
    mx = {"enabled": True, "emulate": True, "targets": ["layers.1.mlp.up.weight"]}
    found = built({"float8": float8, "mx": mx})
    usual = built({}).model.get_submodule("layers.0.mlp.up").product
    products = {
        name: module.product
        for name, module in found.model.named_modules()
        if hasattr(module, "product") and module.product is not usual
    }
    first = {"attention.q", "attention.o", "mlp.gate", "mlp.up", "mlp.down"}
    assert products.keys() == {f"layers.0.{name}" for name in first} | {"layers.1.mlp.up"}
    assert len(set(products.values())) == 2, "one product for each format"
    assert "float8: 5 projections (rowwise, emulated) multiply in it" in found.notes
    assert "mx: 1 projections (mxfp8_rceil, emulated) multiply in it" in found.notes


def test_adapters_stay_as_they_are():
    pytest.importorskip("torchao")
    recipe = Recipe.model_validate(
        {
            "run": {"steps": 1},
            "model": {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64},
            "lora": {"rank": 4},
            "precision": {"compute": "fp32", "float8": {"enabled": True, "emulate": True}},
        }
    )
    model = build_model(recipe, 64, CPU, make_plan(Parallel(), 0, 1, CPU)).model
    torch.manual_seed(0)
    layer = model.get_submodule("layers.0.mlp.up").to_empty(device="cpu")
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(16, 32)
    base = rounded(x, 1, power=True) @ rounded(layer.weight.detach(), 1, power=True).T
    adapter = x.double() @ layer.lora_a.double().T @ layer.lora_b.double().T * layer.scale
    assert distance(layer(x), base + adapter) < 1e-3


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    for table in (Float8(enabled=True), MX(enabled=True)):
        with pytest.raises(EnvironmentFault, match="needs the package torchao") as caught:
            make_product(table)
        assert caught.value.hint == install_command("float8")
