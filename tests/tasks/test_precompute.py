"""Outputs on disk are those of transformers' models, and train as the models themselves do."""

import json
import random

import pytest
import torch

from tests.distributed import run_ranks
from tests.model_zoo.peers import our_model, their_model
from tests.tasks.precomputed_runs import (
    CPU,
    curves_of,
    distilling,
    preferring,
    write,
    write_and_train,
)
from trainer import load_recipe, train
from trainer.engine.assemble.assemble import assemble
from trainer.engine.core.errors import DataError, RecipeError
from trainer.engine.launch.environment import World
from trainer.engine.recipe.checks.task_checks import check_task

PLANS = [
    pytest.param(["rows"], [{"context": 2}], id="context"),
    pytest.param(
        ["pairs", "rows"],
        [{"context": 2}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}],
        id="all",
        marks=pytest.mark.matrix,
    ),
]
VOCAB = 320
FIELDS, LETTERS = ("prompt", "chosen", "rejected"), "abcxyz "


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """A folder with a model of transformers, wider and deeper than the one that is trained."""
    folder = tmp_path_factory.mktemp("frozen")
    their_model(our_model(vocab_size=VOCAB, dim=48, n_layers=3, init_std=0.1)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two files with pairs of unequal lengths."""
    generator = random.Random(0)
    folder = tmp_path_factory.mktemp("pairs")
    for number, count in enumerate((7, 12)):
        lines = [
            json.dumps({key: "".join(generator.choices(LETTERS, k=n)) for key in FIELDS})
            for n in generator.choices(range(2, 10), k=count)
        ]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return [{"name": "jsonl", "path": str(folder / f"{number}.jsonl")} for number in (0, 1)]


def batches_of(recipe, steps=8):
    parts = assemble(recipe, World(), CPU)
    rows = parts.loader.steps(0)
    return parts, [batch for _ in range(steps) for batch in next(rows)] + parts.validation


def test_pairs_come_with_the_log_probabilities_of_transformers_model(frozen, sources, tmp_path):
    write(preferring(frozen, sources, tmp_path))
    parts, batches = batches_of(preferring(frozen, sources, tmp_path))
    assert parts.step.task.frozen is None
    theirs = type(their_model(our_model())).from_pretrained(frozen, dtype=torch.float64)
    for batch in batches:
        with torch.no_grad():
            log_probs = theirs(batch.tokens).logits.log_softmax(-1)
        chosen = log_probs.gather(2, batch.labels.clamp(min=0).unsqueeze(2)).squeeze(2)
        if batch.is_valid is None:
            expected = (chosen * (batch.labels != -100)).sum(1)
            torch.testing.assert_close(batch.reference.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packing", ["ragged", pytest.param("documents", marks=pytest.mark.matrix)])
def test_rows_come_with_the_likeliest_tokens_of_transformers_model(frozen, packing, tmp_path):
    sources = [{"name": "synthetic", "num_documents": n, "seed": n} for n in (30, 20)]
    data = {"packing": packing, "sources": sources, "global_batch": 4}
    task = {"top_k": 5}
    write(distilling(frozen, tmp_path, data, task=task))
    _, batches = batches_of(distilling(frozen, tmp_path, data, task={"top_k": 5}), steps=4)
    theirs = type(their_model(our_model())).from_pretrained(frozen, dtype=torch.float64)
    for batch in batches:
        starts = (batch.positions.flatten() == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], batch.tokens.numel()]
        flat = [x.flatten(0, 1) for x in (batch.teacher_tokens, batch.teacher_log_probs)]
        for start, end in zip(starts, ends, strict=True):
            with torch.no_grad():
                logits = theirs(batch.tokens.flatten()[start:end][None]).logits[0]
            found = (logits / 2).log_softmax(-1).topk(5)
            assert torch.equal(flat[0][start:end].long(), found.indices)
            torch.testing.assert_close(
                flat[1][start:end].double(), found.values, rtol=1e-4, atol=1e-4
            )


def test_training_is_the_same_as_with_the_model_itself(frozen, sources, tmp_path):
    write(preferring(frozen, sources, tmp_path / "pairs"))
    write(preferring(frozen, sources, tmp_path / "ragged", "ragged"))
    write(preferring("", sources, tmp_path / "base"))  # of the weights that training starts from
    write(distilling(frozen, tmp_path / "few"))
    write(distilling(frozen, tmp_path / "all", task={"top_k": VOCAB}))
    found = {
        "pairs": preferring(frozen, sources, tmp_path / "pairs"),
        "live pairs": preferring(frozen, sources),
        "ragged": preferring(frozen, sources, tmp_path / "ragged", "ragged"),
        "adapted": preferring("", sources, tmp_path / "base", lora={"rank": 2}),
        "live adapted": preferring("", sources, lora={"rank": 2}),
        "few": distilling("", tmp_path / "few"),
        "live few": distilling(frozen, task={"top_k": 64}),
        "all": distilling("", tmp_path / "all", task={"top_k": VOCAB}),
        "live all": distilling(frozen),
    }
    found = {name: curves_of(recipe) for name, recipe in found.items()}
    assert found["pairs"] == found["live pairs"]
    assert found["adapted"] == found["live adapted"]
    assert found["few"] == found["live few"]
    for got, wanted in zip(found["ragged"], found["pairs"], strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    # Of all tokens together nothing is left but rounding, 1e-7, times a large logarithm.
    for got, wanted in zip(found["all"], found["live all"], strict=True):
        assert got == pytest.approx(wanted, rel=3e-5)
    assert found["few"][2] < found["all"][2]


@pytest.mark.parametrize(("kinds", "plans"), PLANS)
def test_plans_write_and_read_what_one_process_does(kinds, plans, frozen, sources, tmp_path):
    live = {"pairs": preferring(frozen, sources), "rows": distilling(frozen, task={"top_k": 64})}
    alone = [curves_of(live[kind]) for kind in kinds]
    for number, plan in enumerate(plans):
        folder = tmp_path / str(number)
        for rank in run_ranks(
            2, write_and_train, kinds, plan, frozen, sources, folder, timeout=300
        ):
            for found, wanted in zip(rank, alone, strict=True):
                for got, expected in zip(found, wanted, strict=True):
                    assert got == pytest.approx(expected, abs=1e-5, rel=1e-5), plan


def test_outputs_of_something_else_are_refused_with_what_differs(frozen, sources, tmp_path):
    written = distilling(frozen, tmp_path / "rows")
    write(written)
    other = tmp_path / "other"
    other.mkdir()
    for file in frozen.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assemble(distilling(other, tmp_path / "rows"), World(), CPU)  # the same weights elsewhere
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    base = {"folder": tmp_path / "rows"}
    for changed, named in (
        (distilling(other, **base), "task.teacher"),
        (distilling(frozen, **base, data={"seq_len": 16}), "data.seq_len was 32 and is 16"),
        (distilling(frozen, **base, data={"packing": "none"}), "data.packing"),
        (distilling(frozen, **base, task={"top_k": 7}), "task.top_k was 64 and is 7"),
        (distilling(frozen, **base, data={"validation_fraction": 0.2}), "samples was"),
    ):
        with pytest.raises(RecipeError, match=named) as error:
            assemble(changed, World(), CPU)
        assert "trainer precompute" in error.value.render()
        with pytest.raises(RecipeError, match=named):
            write(changed)
    write(changed, replace_others=True)
    assemble(changed, World(), CPU)
    with pytest.raises(DataError, match=r"outputs\.json"):
        assemble(distilling(frozen, tmp_path / "nowhere"), World(), CPU)


def test_an_interrupted_call_continues_and_a_run_resumes_bit_for_bit(frozen, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.engine.corpus.output_store.FILE_BYTES", 2**16)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        [run]
        dir = "{tmp_path}"
        steps = 2
        [task]
        name = "distillation"
        teacher = "{frozen}"
        precomputed = "{tmp_path / "outputs"}"
        [model]
        flavor = "debug"
        dim = 32
        [data]
        seq_len = 32
        global_batch = 4
        micro_batch = 2
        workers = 1
        validation_fraction = 0.1
        [[data.sources]]
        name = "synthetic"
        num_documents = 20
        document_tokens = 40
        [schedule]
        name = "constant"
        [metrics]
        interval = 1
        [evaluate]
        interval = 2
        [[evaluate.splits]]
        name = "other"
        seq_len = 48
        sources = [{{ name = "synthetic", num_documents = 5, seed = 1 }}]
        """
    )

    def stop(split, done, total):
        if done >= 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(load_recipe(recipe), watch=stop)
    done = []
    notes = write(load_recipe(recipe), watch=lambda *progress: done.append(progress))
    assert done[0][1] == 10  # after a file of 8 samples
    totals = list({split: total for split, _, total in done}.values())
    assert [int(note.split()[1]) for note in notes] == totals
    live = {"run.name": "live", "task.precomputed": "", "task.top_k": 64}
    train(load_recipe(recipe, live))
    train(load_recipe(recipe, {"run.name": "whole"}))
    train(load_recipe(recipe, {"run.name": "parts", "run.steps": 1, "evaluate.interval": 0}))
    train(load_recipe(recipe, {"run.name": "parts"}))
    rows = []
    for name in ("live", "whole", "parts"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found = [row for row in map(json.loads, lines) if row["kind"] in ("train", "eval")]
        rows.append([(row.get("split"), row["step"], row["loss"]) for row in found])
    assert rows[0] == rows[1] == rows[2]
    assert len(rows[0]) == 4


def test_what_cannot_be_precomputed_is_refused_by_name(frozen, sources, tmp_path):
    for recipe, named in (
        (preferring(frozen, sources, "x", loss={"name": "kto"}), "kto"),
        (preferring(frozen, sources, "x", loss={"name": "orpo"}), "orpo"),
        (distilling(""), "teacher"),
        (distilling(frozen, "x", task={"top_k": 0}), "top_k"),
    ):
        assert [finding for finding in check_task(recipe) if named in str(finding)]
    with pytest.raises(RecipeError, match="320 tokens"):
        assemble(distilling(frozen, task={"top_k": 321}), World(), CPU)
    with pytest.raises(RecipeError, match="missing") as error:
        write(distilling("", tmp_path))
    assert [problem.key for problem in error.value.problems] == ["task.teacher"]
