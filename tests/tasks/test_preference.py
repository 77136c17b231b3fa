"""Preferences trained on pairs of answers: transformers' log-probabilities, plans, resuming."""

import json
import math
import random

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.model_zoo.peers import our_model, their_model
from tests.train.plans import curves, recipe_with
from trainer import load_recipe, train
from trainer.engine.assemble.assemble import assemble
from trainer.engine.inference.record_batches import RecordBatches
from trainer.engine.launch.environment import World
from trainer.engine.observe.numbers import to_floats
from trainer.engine.sources.configs import JsonlSource
from trainer.engine.tasks.preference import criteria
from trainer.engine.tasks.preference.config import Preference
from trainer.engine.tasks.preference.criteria import Answers
from trainer.engine.tasks.preference.losses import KTO
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

LOSSES = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"beta": 0.2, "length_normalized": True},
    "orpo": {"beta": 0.4},
    "simpo": {"beta": 2.0, "gamma": 0.5},
}
PLANS = [
    pytest.param([{"context": 2}, {"shard": 2}], id="context and shard"),
    pytest.param([{"tensor": 2}, {"pipeline": 2}], id="others", marks=pytest.mark.matrix),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs of unequal lengths; chosen answers have other letters than rejected ones."""
    generator = random.Random(0)

    def word(letters):
        return "".join(generator.choices(letters, k=generator.randint(2, 9)))

    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"prompt": word("abcxyz "), "chosen": word("abcd"), "rejected": word("wxyz")}
        for _ in range(60)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    their_model(our_model(vocab_size=320, init_std=0.1)).save_pretrained(folder)
    return folder


def preferring(pairs, loss, reference="", **changes):
    data = {
        "seq_len": 32,
        "global_batch": 4,
        "micro_batch": 2,
        "sources": [{"name": "jsonl", "path": str(pairs)}],
        "cache_dir": str(pairs.parent / "cache"),
    }
    task = {"name": "preference", "reference": str(reference)}
    return {"task": task, "loss": loss, "data": data} | changes


def answer_log_probs(model, batch):
    """Sums over the tokens of each answer, by transformers' logits."""
    log_probs = model(batch.tokens).logits.log_softmax(-1)
    chosen = log_probs.gather(2, batch.labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (chosen * (batch.labels != -100)).sum(1)


@pytest.mark.parametrize("name", [*LOSSES, "kto"])
def test_losses_and_gradients_are_those_of_transformers_models(pairs, reference, name):
    keys = LOSSES.get(name, {"beta": 0.3, "desirable_weight": 1.5})
    recipe = recipe_with(**preferring(pairs, {"name": name} | keys, reference))
    parts = assemble(recipe, World(), torch.device("cpu"))
    batches = next(parts.loader.steps(0))
    model = their_model(parts.model).double()
    frozen = type(model).from_pretrained(reference, dtype=torch.float64)
    sides, point = [], []
    for batch in batches:
        with torch.no_grad():
            base = answer_log_probs(frozen, batch)
            if name == "kto":
                mixed = batch.mismatched
                point.append(answer_log_probs(model, mixed) - answer_log_probs(frozen, mixed))
        found, counts = answer_log_probs(model, batch), (batch.labels != -100).sum(1)
        sides.append([Answers(found[i::2], counts[i::2], base[i::2]) for i in (0, 1)])
    losses = []
    for chosen, rejected in sides:
        if name == "kto":
            z = torch.cat(point).mean().clamp(min=0)
            gains = 0.3 * (chosen.log_ratios - z), 0.3 * (z - rejected.log_ratios)
            losses.append((1.5 - 1.5 * gains[0].sigmoid() + 1 - gains[1].sigmoid()) / 2)
        else:
            losses.append(getattr(criteria, name)(chosen, rejected, **keys).losses)
    expected = torch.cat(losses).mean()
    expected.backward()
    gradients = parts.step.accumulate(batches)
    assert gradients.loss.item() == pytest.approx(expected.item(), rel=1e-4)
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    assert gradients.norm.item() == pytest.approx(norm.item(), rel=1e-3)


def all_curves(recipes):
    return [curves(recipe) for recipe in recipes]


@pytest.mark.parametrize("plans", PLANS)
def test_plans_share_the_reference_and_train_as_one_process_does(pairs, plans):
    # KTO needs everything: a reference, mismatched answers, and a statistic of all samples, whose
    # number is odd in the validation.
    given = preferring(pairs, {"name": "kto", "beta": 0.3})
    data = {"global_batch": 6, "validation_fraction": 7 / 60}

    def recipe(plan, micro_batch):
        changed = given["data"] | data | {"micro_batch": micro_batch}
        changed["pad_to"] = 0 if "pipeline" in plan else 4
        return recipe_with(**given | {"data": changed, "parallel": plan})

    ((alone, *others),) = run_ranks(1, all_curves, [recipe({}, n) for n in (2, 1, 3, 4)])
    cases = [(plan, n) for plan in plans for n in ((2,) if "pipeline" in plan else (2, 3))]
    ranks = run_ranks(2, all_curves, [recipe(*case) for case in cases], timeout=300)
    for found in (others, *ranks):
        for curve in found:
            for got, wanted in zip(curve, alone, strict=True):
                assert got == pytest.approx(wanted, abs=1e-5, rel=1e-5), (found, cases)


def cold_and_warm(recipe, cache):
    """Return the curves of a start without a cache, what it left there, and later curves."""
    dist.barrier()  # so that both ranks want the records at once
    cold = curves(recipe)
    dist.barrier()
    made = {file.name: file.stat().st_ino for file in cache.glob("*-records-*")}
    return cold, made, curves(recipe)


@pytest.mark.matrix
@pytest.mark.parametrize("files", [1, 3])
def test_two_ranks_that_start_without_a_cache_train_as_later_ones_do(pairs, tmp_path, files):
    rows = pairs.read_text().splitlines(keepends=True)
    for number in range(files):  # several files are encoded by processes of their own
        (tmp_path / f"{number}.jsonl").write_text("".join(rows[number::files]))
    given = preferring(tmp_path / "*.jsonl", {"name": "orpo"}, parallel={"shard": 2})
    cache = tmp_path / "cache"
    found = run_ranks(2, cold_and_warm, recipe_with(**given), cache, timeout=200)
    assert found[0] == found[1]
    cold, made, warm = found[0]
    assert cold == warm
    assert len([name for name in made if not name.endswith(".lock")]) == 1, "made once"


def test_mismatched_answers_do_not_depend_on_the_size_of_batches(pairs):
    def rows(size, ranks):
        shared = Preference(), KTO(), ByteTokenizer(), [JsonlSource(path=str(pairs))], size, 32
        found = {}
        for rank in range(ranks):
            batches = RecordBatches(*shared, is_labelled=True, rank=rank, ranks=ranks)
            for batch in batches.labelled(limit=15):
                valid = batch.is_valid.tolist()
                for tokens, others in zip(batch.tokens, batch.other_tokens, strict=True):
                    if valid.pop(0):
                        text, other = (
                            ByteTokenizer().decode(row.tolist()) for row in (tokens, others)
                        )
                        found[text] = other
        return found

    (expected, *others) = [rows(*case) for case in ((15, 1), (1, 1), (3, 1), (4, 1), (3, 2))]
    assert len(expected) == 30
    assert all(found == expected for found in others)


@pytest.mark.parametrize("lora", [{}, {"rank": 2}])
def test_without_a_reference_answers_are_compared_with_where_training_started(pairs, lora):
    given = preferring(pairs, {"name": "dpo"}, lora=lora)
    parts = assemble(recipe_with(**given), World(), torch.device("cpu"))
    steps = parts.loader.steps(0)
    numbers = []
    for _ in range(2):
        gradients = parts.step.accumulate(next(steps))
        parts.step.update(1.0)
        parts.step.clear()
        told = parts.step.task.metrics(gradients.sums, gradients.counts)
        numbers.append(to_floats({**told, "loss": gradients.loss}))
    # The same weights give the same bits, and rewards of exactly 0.
    assert numbers[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert numbers[0]["rewards/chosen"] == numbers[0]["rewards/rejected"] == 0
    assert numbers[1]["rewards/margin"] != 0
    own = {name for name, _ in parts.model.named_parameters()}
    frozen = parts.step.task.frozen.model
    assert (frozen is parts.model) is bool(lora)
    assert not lora or any("lora" in name for name in own)


def test_a_run_resumes_exactly_beside_the_weights_that_it_started_from(pairs, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        [run]
        dir = "{tmp_path}"
        steps = 4
        [task]
        name = "preference"
        [model]
        flavor = "debug"
        dim = 32
        [data]
        seq_len = 32
        global_batch = 4
        cache_dir = "{pairs.parent / "cache"}"
        [[data.sources]]
        name = "jsonl"
        path = "{pairs}"
        [schedule]
        name = "constant"
        [metrics]
        interval = 1
        [evaluate]
        interval = 0
        """
    )
    train(load_recipe(recipe, {"run.name": "whole"}))
    train(load_recipe(recipe, {"run.name": "parts", "run.steps": 2}))
    train(load_recipe(recipe, {"run.name": "parts"}))
    rows = []
    for name in ("whole", "parts"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found = [row for row in map(json.loads, lines) if row["kind"] == "train"]
        rows.append([(row["step"], row["loss"], row["rewards/margin"]) for row in found])
    assert rows[0] == rows[1]
    assert [step for step, _, _ in rows[0]] == [1, 2, 3, 4]


def test_rewards_are_those_of_transformers_models_with_one_output(pairs):
    given = preferring(pairs, {"name": "bradley_terry"}) | {"task": {"name": "reward"}}
    parts = assemble(recipe_with(**given), World(), torch.device("cpu"))
    batches = next(parts.loader.steps(0))
    weights = dict(parts.model.named_parameters())
    (layer,) = [weight for name, weight in weights.items() if weight.shape == (1, 32)]
    sizes = their_model(our_model(vocab_size=320, ffn_dim=64)).config.to_dict()
    for key in ("id2label", "label2id"):
        del sizes[key]
    from transformers import LlamaConfig, LlamaForSequenceClassification

    model = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1))
    to_hf = parts.model_config.layout.to_hf
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            target = "score.weight" if weight is layer else to_hf(name)
            theirs[target].copy_(weight)
    model = model.double()
    losses = []
    for batch in batches:
        hidden = model.model(batch.tokens).last_hidden_state
        # Each row's own last token, which their head finds by the token of padding.
        last = hidden[torch.arange(len(batch.tokens)), batch.lengths - 1]
        rewards = model.score(last).squeeze(1)
        losses.append(-(rewards[::2] - rewards[1::2]).sigmoid().log())
    expected = torch.cat(losses).mean()
    expected.backward()
    gradients = parts.step.accumulate(batches)
    assert gradients.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    assert gradients.norm.item() == pytest.approx(norm.item(), rel=1e-4)
