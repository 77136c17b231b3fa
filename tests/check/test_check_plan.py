"""Plans that equal one process, and mistakes that are put in, found and named."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import patch

import pytest

import trainer
from tests.cases import also
from tests.commands import run_in_process
from tests.distributed import CONTEXT
from trainer.engine.check import check_plan as module
from trainer.engine.check.workers import RankPool
from trainer.engine.core.errors import ExitCode, TrainerError
from trainer.engine.launch.child import trainer_command
from trainer.engine.recipe.load import load_recipe

RECIPES = Path(trainer.__file__).parent / "recipes"
DENSE, MOE = RECIPES / "llama3_debug.toml", RECIPES / "moe_debug.toml"
TENSOR = ("parallel.tensor=2", "parallel.shard=1")
SMALL = ("data.micro_batch=1",)
WIDE = ("model.head_dim=64", "model.dim=128", "model.ffn_dim=256", "model.moe.expert_ffn_dim=128")
EXPERTS = ("parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2")


@pytest.fixture(scope="module", autouse=True)
def server():
    """Let the server of the other tests fork our ranks, with what they import."""
    process = CONTEXT.Process(target=int)
    process.start()
    process.join()


@pytest.fixture
def command(capsys):
    """Run the command; return exit code, output and errors."""

    def command(recipe, *options, sets=()):
        words = [word for each in sets for word in ("--set", each)]
        return run_in_process(capsys, "check-plan", str(recipe), *words, *options)

    return command


def put_in(name):
    """Let ranks compute with a mistake of `bugs`."""
    return patch.object(module, "COMPUTE", f"tests.check.bugs:{name}")


def test_a_gradient_that_tensor_ranks_do_not_sum_is_named_with_its_axis(command):
    with put_in("forget_replicated"):
        code, out, _ = command(DENSE, "--world", "2", sets=TENSOR)
    assert code == ExitCode.DIFFERENT == 8
    assert "DIFFERENT in step 1: gradient" in out
    assert "first parameter: layers.0.attention.norm.weight; axis: tensor" in out


def test_experts_of_two_ranks_equal_one_process(command):
    sets = ("parallel.expert=2", *SMALL)
    code, out, err = command(MOE, "--world", "2", "--json", sets=sets)
    assert code == 0, err
    found = json.loads(out)
    assert found["difference"] is None
    assert found["gradient"] <= 1e-12
    assert (found["layers"], found["degrees"]["expert"]) == (2, 2)
    assert found["sizes"]["data.seq_len"] == [256, 32]


SHIPPED = sorted(path.stem for path in RECIPES.glob("*.toml"))
PLANS = {
    "experts in four": (MOE, 8, (*EXPERTS, "parallel.pipeline=2", *SMALL)),
    "experts on all ranks": (MOE, 8, ("parallel.expert=8", "parallel.context=2")),
    "cut in two directions": (
        RECIPES / "llama4_debug.toml",
        4,
        ("parallel.pipeline=2", "parallel.pipelining.schedule=DualPipeV", "parallel.tensor=2"),
    ),
    "tied over a pipeline": (
        RECIPES / "quickstart.toml",
        4,
        ("parallel.pipeline=2", "parallel.replicate=2", "data.micro_batch=2"),
    ),
    "adapters": (
        RECIPES / "lora_debug.toml",
        4,
        ("parallel.pipeline=2", "parallel.tensor=2", "model.n_kv_heads=2", "model.n_heads=4"),
    ),
    "pairs": (
        RECIPES / "preference_debug.toml",
        4,
        ("parallel.context=2", "parallel.tensor=2", "loss.name=kto"),
    ),
}


WORLDS = {
    "llama3_8b": 128,
    "qwen3_30b_a3b": 64,
    "gpt_oss_20b": 64,
    "llama3_405b": 1024,
    "deepseek_v3_671b": 1024,
}
"""ranks of recipes whose plans do not fit four"""


@pytest.mark.parametrize("name", also(*SHIPPED))
def test_the_plans_of_shipped_recipes_equal_one_process(name, command, forgotten_plugins):
    code, out, err = command(RECIPES / f"{name}.toml", "--world", str(WORLDS.get(name, 4)))
    assert code == 0, out + err
    assert out.endswith("equal\n")


@pytest.mark.parametrize("name", also(*PLANS))
def test_plans_equal_one_process(name, command):
    recipe, world, sets = PLANS[name]
    more = SMALL if "parallel.pipeline=2" in sets and "data.micro_batch=2" not in sets else ()
    code, out, err = command(recipe, "--world", str(world), sets=(*sets, *more))
    assert code == 0, out + err


@pytest.mark.parametrize(
    ("bug", "recipe", "sets", "what", "axis"),
    also(
        (
            *("count_experts_twice", MOE, EXPERTS),
            *("gradient, by 1.0e+00; first parameter: layers.0.mlp.experts.down", "expert"),
        ),
        (
            *("scale_a_norm", DENSE, ("parallel.pipeline=2", *TENSOR, *SMALL)),
            *("gradient, by 1.0e-07; first parameter: layers.1.mlp.norm.weight", "pipeline"),
        ),
        (
            *("route_otherwise", MOE, ("parallel.replicate=4", "parallel.fsdp.strategy=no_shard")),
            *("experts of layers.0.mlp.router.weight get other tokens", "replicate"),
        ),
    ),
)
def test_a_mistake_is_found_and_named(bug, recipe, sets, what, axis, command):
    with put_in(bug):
        code, out, err = command(recipe, "--world", "4", sets=sets)
    assert code == ExitCode.DIFFERENT, out + err
    assert what in out
    assert f"axis: {axis}" in out


@pytest.mark.parametrize(
    "sets",
    also(
        (("parallel.tensor=2", "parallel.expert=2"),),
        (("parallel.tensor=2", "precision.float8.enabled=true", *WIDE),),
    ),
)
def test_low_precision_is_no_further_from_float64_than_twice_one_process(sets, command):
    code, out, err = command(MOE, "--world", "4", "--as-is", sets=sets)
    assert code == 0, out + err
    assert "distance of gradients from float64" in out


@pytest.mark.matrix
def test_low_precision_finds_a_mistake_too(command):
    with put_in("count_experts_twice"):
        code, out, err = command(MOE, "--world", "4", "--as-is", sets=EXPERTS)
    assert code == ExitCode.DIFFERENT, out + err
    assert "mlp.experts.down" in out


@pytest.mark.matrix
def test_ranks_that_wait_for_each_other_end_with_their_phase():
    recipe = load_recipe(DENSE, ["parallel.tensor=2", "parallel.shard=1"], 2).recipe
    with RankPool(silence_seconds=10.0) as pool, put_in("wait_for_each_other"):
        with pytest.raises(TrainerError) as caught:
            module.check_plan(recipe, 2, pool)
        folder = pool.folder
    assert "deadlock" in caught.value.message
    assert "rank 0, 1 in 'an exchange'" in caught.value.message
    assert not folder.exists()


@pytest.mark.matrix
def test_a_rank_that_fails_ends_the_others(command):
    started = time.monotonic()
    with put_in("fail"):
        code, _, err = command(DENSE, "--world", "2", sets=TENSOR)
    assert code == ExitCode.FAILED
    assert "rank 1 failed in 'a phase': ValueError: it is the last rank" in err
    assert time.monotonic() - started < 60


@pytest.mark.matrix
def test_nothing_is_left_after_an_interrupt(tmp_path):
    environ = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(RECIPES.parent / ".dev")}
    words = ["check-plan", str(DENSE.resolve()), "--world", "8"]
    process = subprocess.Popen(
        trainer_command(words), cwd=tmp_path, env=environ, start_new_session=True
    )
    while not list(tmp_path.glob("trainer-check-*/store-*")):
        assert process.poll() is None, "it ended before it could be interrupted"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == ExitCode.INTERRUPTED
    assert not list(tmp_path.glob("trainer-check-*"))
    deadline = time.monotonic() + 30
    while _group_lives(process.pid):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)


def _group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_bad_input_is_named_at_its_place(command):
    code, _, err = command(DENSE, sets=("parallel.tensr=2",))
    assert code == ExitCode.RECIPE
    assert 'did you mean "tensor"?' in err
    code, _, err = command(DENSE, "--world", "3")
    assert code == ExitCode.RECIPE
    assert "global_batch (16) does not divide over 3 data ranks" in err
