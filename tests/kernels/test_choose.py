from types import SimpleNamespace

import pytest

from trainer.engine.assemble.kernels import choose_kernels, served
from trainer.engine.assemble.tables import KernelChoices as Table
from trainer.engine.core.errors import RecipeError
from trainer.engine.parallel.tables import Compile
from trainer.kernels import choose as kernel_choice
from trainer.kernels.choose import IMPLEMENTATIONS, UnavailableKernelsError, choose


def test_attention_follows_device_and_row_length():
    known = IMPLEMENTATIONS["attention"]
    assert choose({}, "cpu", 256).attention is known["matmul"]
    assert choose({}, "cpu", 4096).attention is known["sdpa"]
    assert choose({}, "cuda", 256).attention is known["sdpa"]
    assert choose({"attention": "sdpa"}, "cpu", 256).attention is known["sdpa"]


def test_reasons_name_what_was_chosen_and_why():
    reasons = choose({"attention": "sdpa"}, "cpu", 256).reasons
    assert set(reasons) == set(IMPLEMENTATIONS)
    assert reasons["attention"] == "sdpa: asked for"
    assert (
        choose({}, "cpu", 8, compiling=True).reasons["linear_cross_entropy"].startswith("compiled")
    )


def test_unknown_names_are_refused():
    with pytest.raises(KeyError, match="flash9"):
        choose({"attention": "flash9"}, "cpu", 8)


def test_a_recipe_can_name_every_implementation():
    for operation, implementations in IMPLEMENTATIONS.items():
        for name in implementations:
            assert getattr(Table.model_validate({operation: name}), operation) == name


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    wanted = {"rms_norm": "triton", "swiglu": "triton", "rotary": "torch"}
    with pytest.raises(UnavailableKernelsError) as error:
        choose(wanted, "cpu", 8)
    assert set(error.value.reasons) == {"rms_norm", "swiglu"}
    assert "run on a GPU, and this is a CPU" in error.value.reasons["swiglu"]
    monkeypatch.setattr(kernel_choice, "find_spec", lambda name: None)
    with pytest.raises(UnavailableKernelsError, match="triton is not installed"):
        choose(wanted, "cuda", 8)


def test_triton_serves_what_asks_for_it_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernel_choice, "find_spec", lambda name: object())
    with_triton = [name for name, found in IMPLEMENTATIONS.items() if "triton" in found]
    chosen = choose(dict.fromkeys(with_triton, "triton"), "cuda", 8)
    for operation in with_triton:
        assert getattr(chosen, operation) is IMPLEMENTATIONS[operation]["triton"]
        assert chosen.reasons[operation] == "triton: asked for"


def test_auto_takes_no_kernel_that_is_not_measured_to_be_faster():
    reasons = choose({}, "cuda", 8).reasons
    assert not [reason for reason in reasons.values() if reason.startswith("triton")]
    assert reasons["rms_norm"] == "torch: no other is measured to be faster"


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
    assert reasons["rms_norm"] == "torch: no other is measured to be faster"
    assert reasons["attention"] == "sdpa: asked for"


def test_the_log_names_what_serves_each_operation():
    lines = served(choose(dict.fromkeys(["swiglu", "grouped_gemm", "permute"], "torch"), "cpu", 8))
    assert lines == [
        "attention by matmul: fastest on CPUs for rows of up to 1024 tokens",
        "rms_norm, rotary, linear_cross_entropy by torch: no other is measured to be faster",
        "swiglu, grouped_gemm, permute by torch: asked for",
    ]
