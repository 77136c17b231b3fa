from types import SimpleNamespace

import pytest
import torch

from trainer.engine.assemble.build import build_model, build_task
from trainer.engine.assemble.kernel_choice import choose_kernels, describe_choices
from trainer.engine.assemble.tables import KernelChoices as Table
from trainer.engine.core.errors import RecipeError
from trainer.engine.parallel.tables import Compile
from trainer.engine.recipe.schema import Recipe
from trainer.engine.tasks.tables import LossConfig
from trainer.kernels import registry
from trainer.kernels.attention import reference as attention
from trainer.kernels.choose import UnavailableKernelsError, choose, choose_automatically
from trainer.kernels.registry import Implementations, kernels, load


def test_attention_follows_device_and_row_length():
    assert choose({}, "cpu", 256).attention.args == (attention.matmul,)
    assert choose({}, "cpu", 4096).attention.args == (attention.sdpa,)
    assert choose({}, "cuda", 256).attention.args == (attention.sdpa,)
    assert choose({"attention": "sdpa"}, "cpu", 256).attention.args == (attention.sdpa,)


def test_reasons_name_what_was_chosen_and_why():
    reasons = choose({"attention": "sdpa"}, "cpu", 256).reasons
    assert set(reasons) == set(kernels)
    assert reasons["attention"] == "sdpa: requested"
    assert (
        choose({}, "cpu", 8, compiling=True).reasons["linear_cross_entropy"].startswith("compiled")
    )


def test_unknown_names_are_refused():
    with pytest.raises(KeyError, match="flash9"):
        choose({"attention": "flash9"}, "cpu", 8)


def test_a_recipe_can_name_every_implementation():
    for operation, implementations in kernels.items():
        for name in implementations:
            assert getattr(Table.model_validate({operation: name}), operation) == name


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    wanted = {"rms_norm": "triton", "swiglu": "triton", "rotary": "torch"}
    with pytest.raises(UnavailableKernelsError) as error:
        choose(wanted, "cpu", 8)
    assert set(error.value.reasons) == {"rms_norm", "swiglu"}
    assert "run on a GPU, and this is a CPU" in error.value.reasons["swiglu"]
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(UnavailableKernelsError, match="triton is not installed"):
        choose(wanted, "cuda", 8)


def test_triton_serves_what_asks_for_it_on_a_gpu(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: object())
    with_triton = [operation for operation, known in kernels.items() if "triton" in known]
    chosen = choose(dict.fromkeys(with_triton, "triton"), "cuda", 8)
    for operation in with_triton:
        assert getattr(chosen, operation) is load(kernels[operation]["triton"].target)
        assert chosen.reasons[operation] == "triton: requested"


TORCH_ALONE = dict.fromkeys(
    ["rms_norm", "rotary", "swiglu", "linear_cross_entropy", "grouped_gemm", "permute", "moe"],
    "torch",
)
FUSED = dict.fromkeys(["rotary", "swiglu", "linear_cross_entropy", "permute"], "triton")
COMPILED = {"linear_cross_entropy": "compiled"}
OWN_GEMM = {"grouped_gemm": "triton"}
AUTO = {
    # (compute capability, compiled) -> what differs from torch's
    (0, False): {},
    (0, True): COMPILED,
    (1, False): {},  # an AMD GPU
    (75, False): {},
    (75, True): COMPILED,
    (80, False): FUSED | OWN_GEMM,
    (80, True): COMPILED | OWN_GEMM,
    (89, False): FUSED | OWN_GEMM,
    (90, False): FUSED,
    (90, True): COMPILED,
    (100, False): FUSED,
    (103, True): COMPILED,
    (110, False): FUSED | OWN_GEMM,
    (120, True): COMPILED | OWN_GEMM,
}


@pytest.mark.parametrize(("where", "expected"), AUTO.items(), ids=str)
def test_auto_chooses_by_capability_and_by_eager_or_compiled(where, expected):
    capability, compiled = where
    chosen = {
        operation: choose_automatically(operation, capability, compiled=compiled, seq_len=8)[0]
        for operation in kernels
    }
    attention = {"attention": "sdpa", "ragged_attention": "varlen"}
    if capability == 0:
        attention = {"attention": "matmul", "ragged_attention": "blocks"}
    if capability == 75:  # flash attention needs 8.0
        attention["ragged_attention"] = "blocks"
    assert chosen == TORCH_ALONE | attention | expected


def test_auto_asks_the_gpu_in_use_and_takes_torch_where_triton_is_missing(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    reasons = choose({}, "cuda", 8).reasons
    assert reasons["grouped_gemm"] == (
        "triton: F.grouped_mm waits for the host on compute capability 8.6"
    )
    assert reasons["rms_norm"] == "torch: one kernel of torch's own"
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    reasons = choose({}, "cuda", 8).reasons
    assert reasons["grouped_gemm"] == "torch: the package triton is not installed"


def test_a_recipe_that_asks_for_what_cannot_run_is_told_where_and_what_instead():
    table = Table(rms_norm="triton", linear_cross_entropy="triton")
    recipe = SimpleNamespace(kernels=table, compile=Compile(), data=SimpleNamespace(seq_len=8))
    with pytest.raises(RecipeError) as error:
        choose_kernels(recipe, "cpu")
    assert [problem.key for problem in error.value.problems] == [
        "kernels.rms_norm",
        "kernels.linear_cross_entropy",
    ]
    for problem in error.value.problems:
        assert problem.message.startswith('"triton" cannot run here')
        assert '"torch"' in problem.hint


def test_a_checkpoint_trained_with_triton_is_read_where_triton_cannot_run():
    recipe = SimpleNamespace(
        kernels=Table(rms_norm="triton", attention="sdpa"),
        compile=Compile(),
        data=SimpleNamespace(seq_len=8),
    )
    reasons = choose_kernels(recipe, "cpu", trains=False).reasons
    assert reasons["rms_norm"] == "torch: fastest measured"
    assert reasons["attention"] == "sdpa: requested"


def test_the_log_names_what_serves_each_operation():
    lines = describe_choices(
        choose(dict.fromkeys(["swiglu", "grouped_gemm", "permute"], "torch"), "cpu", 8)
    )
    assert lines == [
        "attention: matmul (fastest on CPUs for rows of up to 1024 tokens)",
        "rms_norm, rotary, linear_cross_entropy, moe: torch (fastest measured)",
        "swiglu, grouped_gemm, permute: torch (requested)",
    ]


def test_a_name_belongs_to_one_implementation():
    swiglu = Implementations("swiglu", {})
    swiglu.register("ours", "package.module:swiglu")
    swiglu.register("ours", "package.module:swiglu")
    with pytest.raises(ValueError, match="kernel swiglu 'ours' is registered twice"):
        swiglu.register("ours", "package.other:swiglu")
    assert list(swiglu) == ["ours"]
    assert "theirs" not in swiglu


def test_an_implementation_that_cannot_be_imported_is_a_reason(monkeypatch):
    monkeypatch.setitem(kernels, "swiglu", Implementations("swiglu", {}))
    kernels["swiglu"].register("gone", "no_such_module:swiglu")
    with pytest.raises(UnavailableKernelsError, match="no_such_module:swiglu cannot be imported"):
        choose({"swiglu": "gone"}, "cpu", 8)


def test_an_implementation_says_itself_where_it_cannot_run(monkeypatch):
    monkeypatch.setitem(kernels, "swiglu", Implementations("swiglu", {}))
    obstacle = {"cpu": "it is for GPUs", "cuda": ""}.get
    kernels["swiglu"].register("fast", "trainer.kernels.swiglu.op:swiglu", obstacle)
    with pytest.raises(UnavailableKernelsError, match="swiglu: it is for GPUs"):
        choose({"swiglu": "fast"}, "cpu", 8)
    assert choose({"swiglu": "fast"}, "cuda", 8).reasons["swiglu"] == "fast: requested"


def test_attention_of_a_plugin_reaches_as_far_as_a_model_says(monkeypatch):
    known = kernels["attention"]
    monkeypatch.setitem(kernels, "attention", Implementations("attention", {"sdpa": known["sdpa"]}))
    kernels["attention"].register("plain", "trainer.kernels.attention.reference:matmul")
    chosen = choose({"attention": "plain"}, "cpu", 8)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 9, 2, 4, dtype=torch.float64)
    expected = choose({"attention": "sdpa"}, "cpu", 8)
    torch.testing.assert_close(
        chosen.attention(query, key, value, window=3),
        expected.attention(query, key, value, window=3),
    )
    assert chosen.partial_attention is expected.partial_attention


def plain_attention(query, key, value, mask=None, sinks=None, causal=True):
    raise AssertionError("it is not called")


def plain_loss(hidden, weight, labels, token_losses=None):
    raise AssertionError("it is not called")


class PlainLoss(LossConfig):
    """A loss without a softcap."""

    name: str = "plain_loss"

    def build(self, kernels):
        return plain_loss


@pytest.mark.parametrize(
    ("operation", "function", "capped"),
    [
        ("attention", "plain_attention", "attention scores"),
        ("linear_cross_entropy", "plain_loss", "logits"),
    ],
)
def test_a_kernel_without_a_softcap_is_refused_for_a_model_that_caps(
    monkeypatch, operation, function, capped
):
    known = kernels[operation]
    implementations = Implementations(operation, {name: known[name] for name in known})
    implementations.register("plain", f"{__name__}:{function}")
    monkeypatch.setitem(kernels, operation, implementations)
    for name in ("gemma2", "llama3"):
        recipe = Recipe.model_validate({"run": {"steps": 1}, "model": {"name": name}})
        choices = recipe.kernels.model_copy(update={operation: "plain"})
        recipe = recipe.model_copy(update={"kernels": choices})
        if name == "llama3":
            build_model(recipe, 257, torch.device("cpu"))
            continue
        with pytest.raises(RecipeError) as refused:
            build_model(recipe, 257, torch.device("cpu"))
        (problem,) = refused.value.problems
        assert problem.key == f"kernels.{operation}"
        assert (
            problem.message == f'"plain" has no parameter "softcap", and this model caps {capped}'
        )


def test_a_loss_without_a_softcap_is_refused_for_a_model_that_caps():
    for name in ("gemma2", "llama3"):
        recipe = Recipe.model_validate({"run": {"steps": 1}, "model": {"name": name}})
        recipe = recipe.model_copy(update={"loss": PlainLoss()})
        built = build_model(recipe, 257, torch.device("cpu"))
        if name == "llama3":
            build_task(recipe, built.kernels, built.config)
            continue
        with pytest.raises(RecipeError, match='"plain_loss" has no parameter "softcap"'):
            build_task(recipe, built.kernels, built.config)
