"""A student learns a teacher's distributions: losses of transformers' models, plans, resuming."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import run_ranks
from tests.model_zoo.peers import our_model, their_model
from tests.train.plans import BASE, curves, recipe_with
from trainer import load_recipe, train
from trainer.engine.assemble.assemble import assemble
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.core.errors import RecipeError
from trainer.engine.launch.environment import World
from trainer.engine.train.evaluate import validate
from trainer.model_zoo.llama3.config import Llama3Config

PLANS = [
    pytest.param([{"pipeline": 2}], id="pipeline"),
    pytest.param(
        [{"shard": 2}, {"tensor": 2}, {"context": 2}], id="others", marks=pytest.mark.matrix
    ),
]
SOFT = {"name": "forward_kl", "temperature": 2.0, "hard_weight": 0.3}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder with a model of transformers, wider and deeper than the student."""
    folder = tmp_path_factory.mktemp("teacher")
    ours = our_model(vocab_size=320, dim=48, n_layers=3, init_std=0.1)
    their_model(ours).save_pretrained(folder)
    return folder


def distilling(teacher, **changes):
    return {"task": {"name": "distillation", "teacher": str(teacher)}, "loss": SOFT} | changes


def divergence(kind, student, teacher):
    """Sum over tokens of torch's divergence of two log-probabilities."""
    if kind == "forward_kl":
        return F.kl_div(student, teacher, log_target=True, reduction="sum")
    if kind == "reverse_kl":
        return F.kl_div(teacher, student, log_target=True, reduction="sum")
    mean = torch.logaddexp(student, teacher) - torch.log(torch.tensor(2.0))
    return sum(F.kl_div(mean, p, log_target=True, reduction="sum") for p in (student, teacher)) / 2


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jensen_shannon"])
def test_losses_and_gradients_are_those_of_transformers_models(teacher, kind):
    loss = SOFT | {"name": kind}
    parts = assemble(recipe_with(**distilling(teacher, loss=loss)), World(), torch.device("cpu"))
    batches = next(parts.loader.steps(0))
    student = their_model(parts.model).double()
    # From the folder, in float64: not by way of our reader.
    frozen = type(student).from_pretrained(teacher, dtype=torch.float64)
    soft = hard = count = 0
    for batch in batches:
        logits = student(batch.tokens).logits
        with torch.no_grad():
            wanted = frozen(batch.tokens).logits
        pair = [(each.flatten(0, 1) / 2).log_softmax(-1) for each in (logits, wanted)]
        counts = batch.labels.flatten() != -100
        soft = soft + divergence(kind, *(each[counts] for each in pair))
        hard = hard + F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        count += counts.sum()
    expected = (0.7 * 4 * soft + 0.3 * hard) / count
    expected.backward()
    gradients = parts.step.accumulate(batches)
    assert gradients.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in student.parameters()])
    assert gradients.norm.item() == pytest.approx(norm.item(), rel=1e-4)
    numbers = validate(parts)
    soft, hard = numbers["divergence"], numbers["cross_entropy"]
    assert numbers["loss"] == pytest.approx(0.7 * 4 * soft + 0.3 * hard)


def test_metrics_measure_the_tokens_of_the_student(teacher):
    evaluate = {"steps": 2, "metrics": [{"name": "accuracy"}]}
    recipe = recipe_with(**distilling(teacher, evaluate=evaluate))
    parts = assemble(recipe, World(), torch.device("cpu"))
    for batches in itertools.islice(parts.loader.steps(0), 4):
        parts.step.accumulate(batches)
        parts.step.update(1.0)
        parts.step.clear()
    found = validate(parts)
    right = total = 0
    for batch in parts.validation:
        with torch.no_grad():
            best = parts.model(batch.tokens).argmax(-1)
        right += (best == batch.labels).sum().item()
        total += (batch.labels >= 0).sum().item()
    assert right
    assert found["accuracy"] == pytest.approx(right / total)


def all_curves(recipes):
    return [curves(recipe) for recipe in recipes]


def test_a_teacher_follows_the_rules_that_name_its_weights(teacher):
    """The student's last block has no counterpart in the teacher."""
    model = BASE["model"] | {"n_layers": 4}
    parallel = {
        "shard": 2,
        "fsdp": {"ignored": ["layers.3.mlp.norm.weight", "head.norm.weight"]},
        "rules": [{"match": "layers.3.mlp.up.weight", "place": {"shard": 1}}],
    }
    ((alone,),) = run_ranks(1, all_curves, [recipe_with(**distilling(teacher, model=model))])
    recipe = recipe_with(**distilling(teacher, model=model, parallel=parallel))
    for ((*found,),) in run_ranks(2, all_curves, [recipe]):
        for got, wanted in zip(found, alone, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("plans", PLANS)
def test_plans_share_the_teacher_and_train_as_one_process_does(teacher, plans):
    ((alone,),) = run_ranks(1, all_curves, [recipe_with(**distilling(teacher))])
    data = BASE["data"] | {"micro_batch": 2}
    recipes = [recipe_with(**distilling(teacher), parallel=plan, data=data) for plan in plans]
    for rank in run_ranks(2, all_curves, recipes, timeout=300):
        for plan, found in zip(plans, rank, strict=True):
            for got, wanted in zip(found, alone, strict=True):
                assert got == pytest.approx(wanted, abs=1e-5, rel=1e-5), plan


def test_a_run_saves_no_teacher_and_resumes_with_the_same_alone(teacher, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        [run]
        dir = "{tmp_path}"
        steps = 2
        [task]
        name = "distillation"
        teacher = "{teacher}"
        [model]
        flavor = "debug"
        dim = 32
        [data]
        seq_len = 16
        global_batch = 2
        [[data.sources]]
        name = "synthetic"
        num_documents = 50
        [schedule]
        name = "constant"
        """
    )
    train(load_recipe(recipe))
    manifest = find_checkpoint(tmp_path / "recipe").manifest
    shapes = {tuple(entry["shape"]) for entry in manifest.tensors.values()}
    assert not {shape for shape in shapes if 48 in shape}
    # The same weights elsewhere are the same teacher.
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in teacher.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    train(load_recipe(recipe, {"task.teacher": str(moved), "run.steps": 3}))
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    with pytest.raises(RecipeError, match="content changed") as error:
        train(load_recipe(recipe, {"task.teacher": str(moved), "run.steps": 4}))
    assert [problem.key for problem in error.value.problems] == ["task.teacher"]


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    their_model(our_model(vocab_size=400)).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="400") as error:
        assemble(recipe_with(**distilling(tmp_path)), World(), torch.device("cpu"))
    assert [problem.key for problem in error.value.problems] == ["task.teacher"]


def test_a_teacher_of_rows_of_one_length_is_refused_with_ragged_ones(teacher, monkeypatch):
    monkeypatch.setattr(Llama3Config, "takes_lengths", False)
    given = distilling(teacher, model={"name": "qwen3"}, data=BASE["data"] | {"packing": "ragged"})
    with pytest.raises(RecipeError, match="rows of one length") as error:
        assemble(recipe_with(**given), World(), torch.device("cpu"))
    assert [problem.key for problem in error.value.problems] == ["task.teacher"]
