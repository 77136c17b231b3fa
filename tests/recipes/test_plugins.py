"""A package that adds components, by `[plugins] modules` and as an installed package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainer

ROOT = Path(trainer.__file__).absolute().parents[1]
SAMPLE = Path(__file__).parents[1] / "plugin"
RECIPE = """\
[run]
steps = 3
[model]
name = "position_wise"
flavor = "wide"
n_layers = 1
[optimizer]
name = "sign_descent"
momentum = 0.5
[[optimizer.groups]]
match = "*.norm.weight"
weight_decay = 0.5
[[data.sources]]
name = "counting"
longest = 12
"""
BY_MODULE = RECIPE + '[plugins]\nmodules = ["trainer_sample"]\n'
ENTRY_POINTS = """\
[trainer.optimizer]
sign_descent = trainer_sample:SignDescent
[trainer.model]
position_wise = trainer_sample:PositionWiseConfig
[trainer.source]
counting = trainer_sample:Counting
"""


@pytest.fixture
def install(tmp_path):
    """Make the sample look installed, with these entry points."""

    def install(entry_points):
        folder = tmp_path / "site" / "trainer_sample-0.1.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: trainer-sample\nVersion: 0.1\n"
        )
        (folder / "entry_points.txt").write_text(entry_points)

    return install


def explained(done):
    assert done.returncode == 0, done.stderr
    return {each["key"]: each["value"] for each in json.loads(done.stdout)}


def check_explained(values):
    assert values["model.dim"] == 128
    assert values["optimizer.momentum"] == 0.5
    assert values["data.sources.0.longest"] == 12
    assert values["data.sources.0.num_documents"] == 64


def test_a_module_registers_an_optimizer_a_model_and_a_source(command):
    check_explained(explained(command("explain", "recipe.toml", "--json", recipe=BY_MODULE)))


def test_an_installed_package_offers_them_without_a_word_in_the_recipe(command, install):
    install(ENTRY_POINTS)
    check_explained(explained(command("explain", "recipe.toml", "--json", recipe=RECIPE)))
    assert "sign_descent" in command("list", "optimizer").stdout
    assert "size of a step" in command("list", "optimizer", "sign_descent").stdout
    schema = json.loads(command("schema").stdout)
    names = [
        option["properties"]["name"]["const"] for option in schema["properties"]["model"]["oneOf"]
    ]
    assert names == sorted(names)
    assert {"llama3", "position_wise"} <= {*names}


def test_both_ways_at_once_are_no_conflict(command, install):
    install(ENTRY_POINTS)
    assert command("validate", "recipe.toml", recipe=BY_MODULE).returncode == 0


def test_without_the_plugin_its_names_are_unknown(command):
    done = command("validate", "recipe.toml", recipe=RECIPE)
    assert done.returncode == 2
    assert 'recipe.toml:4:1: model.name: no model is named "position_wise"' in done.stderr
    assert 'recipe.toml:8:1: optimizer.name: no optimizer is named "sign_descent"' in done.stderr
    assert 'recipe.toml:14:1: data.sources.0.name: no source is named "counting"' in done.stderr


def test_a_plugin_s_own_keys_are_checked_and_spelled(command):
    text = BY_MODULE.replace("momentum = 0.5", "momentun = 0.5").replace(
        "longest = 12", "longest = 0"
    )
    done = command("validate", "recipe.toml", recipe=text)
    assert done.stderr == (
        'error: recipe.toml:9:1: optimizer.momentun: unknown key "momentun"; '
        'did you mean "momentum"?\n'
        "error: recipe.toml:15:1: data.sources.0.longest: expected at least 1, got 0\n"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import nosuchmodule", "ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("raise SystemExit('no')", "SystemExit: no"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_cannot_be_imported_is_located(command, tmp_path, body, message):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "broken.py").write_text(body)
    text = '[run]\nsteps = 1\nseed = -1\n[plugins]\nmodules = ["json", "broken"]\n'
    done = command("validate", "recipe.toml", recipe=text)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert f"error: recipe.toml:5:20: plugins.modules.1: cannot import 'broken': {message}" in lines
    assert len(lines) == 2


def test_a_broken_package_hurts_only_who_names_it(command, install):
    install("[trainer.optimizer]\nsign_descent = nosuch:Thing\nodd = json:dumps\n")
    assert command("validate", "recipe.toml", recipe="[run]\nsteps = 1\n").returncode == 0
    done = command(
        "validate", "recipe.toml", recipe='[run]\nsteps=1\n[optimizer]\nname="sign_descent"'
    )
    assert done.returncode == 3
    assert "the optimizer 'sign_descent' of trainer-sample cannot be used" in done.stderr
    done = command("validate", "recipe.toml", recipe='[run]\nsteps=1\n[optimizer]\nname="odd"')
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_a_run_trains_resumes_and_samples_with_a_plugin_s_parts(command, install, tmp_path):
    install(ENTRY_POINTS)
    settings = ["--set", "run.dir=runs", "--set", "schedule.name=constant"]
    settings += ["--set", f"data.cache_dir={tmp_path / 'cache'}", "--set", "data.seq_len=32"]
    for steps in (20, 40):
        done = command(
            "run", "recipe.toml", *settings, "--set", f"run.steps={steps}", recipe=RECIPE
        )
        assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    lines = (tmp_path / "runs" / "recipe" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 10, 20, 30, 40]
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    manifest = json.loads(command("checkpoint", "inspect", "runs/recipe", "--json").stdout)
    assert any(name.endswith(".mean") for name in str(manifest).split("'"))
    done = command("generate", "runs/recipe", "--prompt", "0 1", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 1")


PLAIN_SWIGLU = """
from torch.nn.functional import silu

def swiglu(gate, up, row_weight=None):
    out = silu(gate) * up
    return out if row_weight is None else out * row_weight.unsqueeze(-1)
"""
REGISTERS = """
from trainer.plugins import kernels

kernels["swiglu"].register("plain", "plain_swiglu:swiglu")
"""
KERNEL_RECIPE = """\
[run]
steps = 1
dir = "runs"
[[data.sources]]
name = "synthetic"
[kernels]
swiglu = "plain"
"""


def test_a_module_adds_an_implementation_of_a_kernel(command, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "plain_swiglu.py").write_text(PLAIN_SWIGLU)
    (tmp_path / "site" / "fast.py").write_text(REGISTERS)
    done = command("validate", "recipe.toml", recipe=KERNEL_RECIPE)
    assert 'kernels.swiglu: expected "auto", "torch" or "triton", got "plain"' in done.stderr
    recipe = KERNEL_RECIPE + '[plugins]\nmodules = ["fast"]\n'
    done = command("run", "recipe.toml", recipe=recipe)
    assert done.returncode == 0, done.stderr
    assert "swiglu: plain (requested)" in done.stdout + done.stderr


def test_an_installed_package_offers_an_implementation_of_a_kernel(command, install, tmp_path):
    install("[trainer.kernel]\nswiglu.plain = plain_swiglu:swiglu\n")
    done = command("validate", "recipe.toml", recipe=KERNEL_RECIPE)
    assert done.returncode == 0, done.stderr  # the module that it names is not imported yet
    done = command("run", "recipe.toml", recipe=KERNEL_RECIPE)
    assert done.returncode == 2
    assert '"plain" cannot run here: plain_swiglu:swiglu cannot be imported' in done.stderr
    (tmp_path / "site" / "plain_swiglu.py").write_text(PLAIN_SWIGLU)
    assert command("run", "recipe.toml", recipe=KERNEL_RECIPE).returncode == 0
    words = json.loads(command("schema").stdout)["$defs"]["KernelChoices"]["properties"]
    assert words["swiglu"]["enum"] == ["auto", "torch", "triton", "plain"]


def test_names_that_older_plugins_import_work_with_a_warning():
    """Those that docs/guide/plugins.md named before `trainer.plugins` existed."""
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from trainer.engine.config import Count, LocalPath, RecipePath, Table
    from trainer.engine.data.configs import DocumentSource, TokenizerConfig, sources, tokenizers
    from trainer.engine.data.documents import Document, DocumentFault, MarkedText
    from trainer.engine.errors import DataError, RecipeError
    from trainer.engine.loss.configs import LossConfig, losses
    from trainer.engine.models import models
from trainer import plugins
assert sources is plugins.sources and models is plugins.models
assert {w.category for w in caught} == {FutureWarning}, caught
assert len(caught) == 6 and "import from trainer.plugins" in str(caught[0].message)
import sys
assert "torch" not in sys.modules
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr
