"""torch.compile: its settings, and a cache on disk that only its owner can write."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch._inductor.config

from trainer.engine.assemble.build import build_model
from trainer.engine.core.errors import EnvironmentFault, RecipeError
from trainer.engine.core.files import make_private
from trainer.engine.parallel.compiler import make_compiler, open_cache
from trainer.engine.parallel.plan import make_plan
from trainer.engine.parallel.tables import Compile, Memory
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.schema import Recipe

KEY = "compile.cache_dir"

# Compiles a function with a gradient of its own, twice called as a block would be, and prints how
# torch's caches answered, and the gradient. Arguments: folder, factor of the gradient, option.
PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from trainer.engine.parallel.selective import selective_contexts
from trainer.engine.parallel.compiler import make_compiler
from trainer.engine.parallel.tables import Compile, Memory

factor, keep = float(sys.argv[2]), sys.argv[3]
contexts = selective_contexts([keep]) if keep else None

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * factor

def block(x, w):
    inner = lambda x: Scaled.apply(torch.mm(x, w).sin())
    if contexts:
        return checkpoint(inner, x, use_reentrant=False, context_fn=contexts)
    return inner(x)

compiled = make_compiler(Compile(enabled=True, cache_dir=sys.argv[1]), Memory())(block)
x, w = torch.zeros(2, 8, requires_grad=True), torch.ones(8, 8)
compiled(x, w).sum().backward()
found = {**counters["aot_autograd"], **counters["inductor"]}
print(json.dumps({"gradient": x.grad[0, 0].item(), **found}))
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Forget the folder that a test has chosen, and leave out what makes only first starts slow."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        yield


def start(folder, factor=3, keep=""):
    """Run the program in a process of its own."""
    command = [sys.executable, "-P", "-c", PROGRAM, str(folder), str(factor), keep]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.matrix
@pytest.mark.slow
def test_a_later_start_finds_every_graph(tmp_path):
    first, second = (start(tmp_path / "cache") for _ in range(2))
    assert first["autograd_cache_miss"] == 1
    assert "autograd_cache_bypass" not in first
    assert second["autograd_cache_hit"] == 1
    assert not {"autograd_cache_miss", "fxgraph_cache_miss"} & {*second}
    assert [each["gradient"] for each in (first, second)] == [24, 24]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.matrix
def test_a_function_of_another_gradient_does_not_find_the_graph(tmp_path):
    found = [start(tmp_path / "cache", factor) for factor in (3, 5)]
    # Only the backward pass differs: a key that left it out would return the gradient of before.
    assert [each["autograd_cache_miss"] for each in found] == [1, 1]
    assert [each["gradient"] for each in found] == [24, 40]


@pytest.mark.matrix
def test_graphs_of_selective_recomputation_are_found_by_their_operations(tmp_path):
    first, second, other = (start(tmp_path / "cache", 3, word) for word in ("mm", "mm", "norm"))
    assert "autograd_cache_bypass" not in first
    assert second["autograd_cache_hit"] == 1
    assert "autograd_cache_hit" not in other


@pytest.mark.matrix
def test_graphs_of_other_instructions_are_not_found(tmp_path, monkeypatch):
    found = [start(tmp_path / "cache")]
    for limit in ("default", "avx2"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
        found.append(start(tmp_path / "cache"))
    assert [each["autograd_cache_miss"] for each in found] == [1, 1, 1]
    assert [each["gradient"] for each in found] == [24, 24, 24]


@pytest.mark.matrix
def test_a_second_compiled_run_finds_every_graph(tmp_path):
    settings = {
        "run.dir": tmp_path, "run.steps": 2, "schedule.warmup_steps": 0, "evaluate.interval": 0,
        "compile.enabled": "true", "compile.cache_dir": tmp_path / "cache",
    }  # fmt: skip
    program = """
import json, os, sys
from trainer.cli import main
def end(code):
    from torch._dynamo.utils import counters
    print(json.dumps({**counters["aot_autograd"], **counters["inductor"]}), flush=True)
    os._exit(code)
main.end_process = end
main.main()
"""
    found = []
    for name in ("first", "second"):
        words = [f"--set={key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-P", "-c", program, "run", "recipes/llama3_debug.toml"]
        command += [*words, f"--set=run.name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert "autograd_cache_bypass" not in first
    assert second["autograd_cache_hit"] == first["autograd_cache_miss"] == second["total"]
    assert "fxgraph_cache_miss" not in second


def test_a_folder_is_made_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        make_private(tmp_path / "cache", KEY)
    finally:
        os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_read_or_that_is_empty_becomes_private(tmp_path):
    for name, mode, files in (("read", 0o755, ["code.py"]), ("empty", 0o777, [])):
        folder = tmp_path / name
        folder.mkdir()
        for file in files:
            (folder / file).touch()
        folder.chmod(mode)
        make_private(folder, KEY)
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_in_which_others_may_have_written_is_refused(tmp_path, mode):
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "code.py").touch()
    folder.chmod(mode)
    with pytest.raises(EnvironmentFault, match="others can write in"):
        make_private(folder, KEY)


def test_a_folder_that_others_can_replace_is_refused(tmp_path):
    above = tmp_path / "open"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(EnvironmentFault, match=f"others can write in {above}"):
        make_private(above / "cache", KEY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    os.chown(tmp_path / "cache", 12345, 12345)
    with pytest.raises(EnvironmentFault, match="belongs to another user"):
        make_private(tmp_path / "cache", KEY)


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_a_compiled_loss_uses_the_private_folder_without_compiled_blocks(tmp_path, backend):
    folder = tmp_path / "cache"
    recipe = Recipe.model_validate(
        {
            "run": {"steps": 1},
            "model": {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 32},
            "kernels": {"linear_cross_entropy": "compiled"},
            "compile": {
                "cache_dir": str(folder),
                "enabled": backend == "eager",
                "backend": backend,
            },
        }
    )
    device = torch.device("cpu")
    build_model(recipe, 64, device)
    assert not folder.exists(), "what is not trained compiles no loss"
    build_model(recipe, 64, device, make_plan(recipe.parallel, 0, 1, device))
    assert folder.stat().st_mode & 0o777 == 0o700
    inner = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert inner.parent == folder
    assert inner.stat().st_mode & 0o777 == 0o700
    open_cache("")  # as a process does that this one starts
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(inner)


@pytest.mark.parametrize("inside", ["run/cache", "run/checkpoints/step-00000002/cache"])
def test_no_code_is_read_from_the_folder_of_a_run(tmp_path, inside):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "recipe.toml").touch()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for folder in (tmp_path / inside, tmp_path / "link" / "cache"):
        with pytest.raises(EnvironmentFault, match="folder of a run or checkpoint"):
            open_cache(str(folder))
        assert not folder.exists()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            'mode = "max-autotune"\noptions = { epilogue_fusion = true }',
            'compile.mode: mode = "max-autotune" and options are both given: a mode is a set of',
        ),
        (
            'mode = "max-autotune"\nbackend = "eager"',
            'mode = "max-autotune" belongs to the backend "inductor", not "eager"',
        ),
        (
            'options = { "cpp.cxx" = "./evil" }',
            'compile.options."cpp.cxx": expected a number, true or false',
        ),
        ("options = { triton = { cudagraphs = true } }", 'as "triton.cudagraphs" = true'),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(tmp_path, lines, expected):
    file = tmp_path / "run.toml"
    file.write_text(f"[run]\nsteps = 1\n[compile]\nenabled = true\n{lines}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(file)
    assert expected in error.value.render()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("epilogue_fusio", True, 'did you mean "epilogue_fusion"?'),
        ("triton.cudagraphs", 3, "is a int, and inductor expects a bool"),
    ],
)
def test_an_option_that_inductor_does_not_have_is_named(tmp_path, name, value, expected):
    table = Compile(enabled=True, cache_dir=str(tmp_path / "cache"), options={name: value})
    with pytest.raises(RecipeError) as error:
        make_compiler(table, Memory())
    assert error.value.problems[0].key == f"compile.options.{name}"
    assert expected in error.value.render()


@pytest.mark.parametrize(
    ("table", "patches"),
    [
        ({"options": {"max_autotune": True}}, {"max_autotune": True}),
        ({"mode": "reduce-overhead", "dynamic": False}, {"triton.cudagraphs": True}),
        ({"fullgraph": False}, None),
    ],
)
def test_settings_reach_the_compiler(tmp_path, table, patches):
    compile_ = Compile(enabled=True, cache_dir=str(tmp_path / "cache"), **table)
    found = make_compiler(compile_, Memory()).keywords
    assert found == {
        "backend": "inductor",
        "options": patches,
        "dynamic": table.get("dynamic"),
        "fullgraph": table.get("fullgraph", True),
    }
