"""What is learned: classes of texts, preferences that change answers, and what a teacher knows."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainer
from trainer import load_recipe, open_model, train

pytestmark = [pytest.mark.matrix, pytest.mark.slow]

NAMES = ["Olga", "Ida", "Hana", "Ben", "Carl", "Dina", "Emil", "Fay"]
CITIES = ["Rome", "Oslo", "Paris", "Kyoto", "Lima", "Cairo"]
HELD_OUT = 12
"""prompts, of 48, that no model is trained on"""
COMMON = """
[precision]
compute = "fp32"
[data]
seq_len = 64
global_batch = 16
micro_batch = 16
cache_dir = "{folder}/cache"
"""
SMALL = """
[model]
flavor = "debug"
dim = {dim}
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = {ffn}
"""


def write_recipe(folder, name, *tables):
    path = folder / f"{name}.toml"
    path.write_text("\n".join(tables).replace("{folder}", str(folder)))
    return path


def last_evaluation(folder, name):
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "eval"][-1]


def answers_of(name, city):
    """Return a prompt, the answer that follows the rule, and the one that does not."""
    prompt = f"{name} went to {city}. Where is {name}? "
    return prompt, f"{name} is in {city}, thanks.", f"{city}."


@torch.no_grad()
def sample(model, tokenizer, prompt, seed, count=24, most=32):
    """Return sampled rows of tokens, the first of an answer, and the answers as texts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([[int(token) for token in tokenizer.encode(prompt)]] * count)
    start = ids.shape[1]
    for _ in range(most):
        drawn = torch.multinomial(model(ids)[:, -1].softmax(-1), 1, generator=generator)
        ended = (ids[:, start:] == tokenizer.eos_id).any(1, keepdim=True)
        ids = torch.cat([ids, drawn.masked_fill(ended, tokenizer.eos_id)], 1)
    return ids, start, [tokenizer.decode(row.tolist()) for row in ids[:, start:]]


@torch.no_grad()
def answer_log_probs(model, ids, start, eos_id):
    """Return the log-probability of each answer, its end included."""
    tokens = ids[:, 1:].unsqueeze(2)
    log_probs = model(ids[:, :-1]).log_softmax(-1).gather(2, tokens).squeeze(2)[:, start - 1 :]
    is_end = (ids[:, start:] == eos_id).int()
    return (log_probs * (is_end.cumsum(1) - is_end == 0)).sum(1)


@pytest.mark.timeout(1800)
def test_dpo_makes_a_finetuned_model_follow_a_rule(tmp_path):
    generator = random.Random(0)
    prompts = [(name, city) for name in NAMES for city in CITIES]
    generator.shuffle(prompts)
    held_out, learned = prompts[:HELD_OUT], prompts[HELD_OUT:]
    texts, pairs = [], []
    for _ in range(400):
        prompt, polite, short = answers_of(*generator.choice(learned))
        texts.append({"text": prompt + (polite if generator.random() < 0.3 else short)})
        pairs.append({"prompt": prompt, "chosen": polite, "rejected": short})
    keys = ("prompt", "chosen", "rejected")
    judged = [dict(zip(keys, answers_of(*place), strict=True)) for place in held_out]
    for kind, rows in (("texts", texts), ("pairs", pairs), ("judged", judged)):
        (tmp_path / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = SMALL.format(dim=64, ffn=192)

    def source(kind):
        return f'[[data.sources]]\nname = "jsonl"\npath = "{{folder}}/{kind}.jsonl"'

    finetune = (
        '[run]\nsteps = 250\ndir = "{folder}"\n[optimizer]\nlr = 3e-3\n[evaluate]\ninterval = 0'
    )
    packed = COMMON + 'packing = "none"\n'
    train(load_recipe(write_recipe(tmp_path, "sft", finetune, model, packed, source("texts"))))
    prefer = """
        [task]
        name = "preference"
        [loss]
        name = "dpo"
        beta = 0.5
        [run]
        steps = 20
        dir = "{folder}"
        init_from = "{folder}/sft"
        [optimizer]
        lr = 1e-4
        [evaluate]
        interval = 20
        steps = 0
    """
    judge = source("judged") + '\nsplit = "validation"'
    sources = (source("pairs"), judge)
    train(load_recipe(write_recipe(tmp_path, "dpo", prefer, model, COMMON, *sources)))
    before, after = (open_model(tmp_path / name) for name in ("sft", "dpo"))
    tokenizer, eos_id = before.tokenizer, before.tokenizer.eos_id
    follows, divergences = {"before": [], "after": []}, []
    for seed, place in enumerate(held_out):
        prompt, _, _ = answers_of(*place)
        for key, opened in (("before", before), ("after", after)):
            ids, start, answers = sample(opened.model, tokenizer, prompt, seed)
            follows[key] += ["thanks" in answer for answer in answers]
        # KL(after || before), estimated with samples of the model after.
        own, old = (answer_log_probs(each.model, ids, start, eos_id) for each in (after, before))
        divergences += (own - old).tolist()
    shares = {key: sum(values) / len(values) for key, values in follows.items()}
    divergence = sum(divergences) / len(divergences)
    accuracy = last_evaluation(tmp_path, "dpo")["accuracy"]
    print(f"held-out accuracy {accuracy}, KL {divergence:.2f} nats an answer, follows {shares}")
    assert accuracy >= 0.75
    assert divergence <= 5
    assert shares["after"] > shares["before"] + 0.2


@pytest.mark.timeout(1800)
def test_a_student_of_a_teacher_beats_one_that_trains_alone(tmp_path):
    run = """
        [run]
        steps = {steps}
        dir = "{folder}"
        [optimizer]
        lr = 3e-3
        [schedule]
        warmup_steps = 10
    """
    common = (
        COMMON
        + """
        [[data.sources]]
        name = "synthetic"
        num_documents = 2000
        document_tokens = 100
        [evaluate]
        interval = 1000
        steps = 8
    """
    )
    long, short = (run.replace("{steps}", steps) for steps in ("300", "100"))
    train(
        load_recipe(write_recipe(tmp_path, "teacher", long, SMALL.format(dim=96, ffn=288), common))
    )
    task = (
        '[task]\nname = "distillation"\nteacher = "{folder}/teacher"\n[loss]\nname = "forward_kl"'
    )
    student = SMALL.format(dim=32, ffn=96)
    alone = write_recipe(tmp_path, "alone", short, student, common)
    taught = write_recipe(tmp_path, "taught", task, short, student, common)
    for seed in range(3):
        names = {"run.name": f"alone-{seed}"}, {"run.name": f"taught-{seed}"}
        train(load_recipe(alone, {"run.seed": seed, **names[0]}))
        train(load_recipe(taught, {"run.seed": seed, **names[1]}))
        losses = (
            last_evaluation(tmp_path, f"alone-{seed}")["loss"],
            last_evaluation(tmp_path, f"taught-{seed}")["cross_entropy"],
        )
        print(f"seed {seed}: alone {losses[0]:.3f}, taught {losses[1]:.3f} nats a token")
        assert losses[0] - losses[1] >= 0.03


@pytest.mark.timeout(1800)
def test_a_small_classifier_reaches_a_linear_model(tmp_path):
    benchmark = Path(trainer.__file__).parent.resolve() / "benchmarks/classification.py"
    done = subprocess.run([sys.executable, benchmark], cwd=tmp_path, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
