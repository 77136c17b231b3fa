"""`trainer infer` and `trainer evaluate` on runs of several tasks."""

import json
import shutil

import pytest
import torch

from tests.commands import run_trainer
from trainer import infer as infer_records
from trainer import open_model
from trainer.cli.main import main
from trainer.engine.tasks.encode_answers import locate_answer
from trainer.engine.tasks.predictions import find_spans
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

TEXTS = ["rain falls", "figs are sold here", "a goal", "snow", "the team wins a match", "fog"]
LABELS = ["weather", "food", "sport", "weather", "sport", "weather"]
RECIPE = """
[task]
name = "{task}"
{labels}

[run]
dir = "{folder}"
name = "{task}"
steps = 4

[model]
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 2
ffn_dim = 64

[data]
seq_len = 64
global_batch = 4
micro_batch = 4
validation_fraction = 0.5

[[data.sources]]
name = "jsonl"
path = "{data}"
fields = {fields}

[evaluate]
interval = 2
steps = 10

[checkpoint]
interval = 2
keep = 3

[precision]
compute = "fp32"
"""
CLASSES = 'labels = ["food", "sport", "weather"]'


@pytest.fixture(scope="module")
def command_line():
    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return int(stop.value.code or 0)

    return call


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(call, folder, task, rows, labels="", fields="{}"):
    data = write_rows(folder / f"{task}.jsonl", rows)
    values = {"folder": folder, "task": task, "data": data, "labels": labels, "fields": fields}
    recipe = folder / f"{task}.toml"
    recipe.write_text(RECIPE.format(**values))
    assert call("run", recipe) == 0
    return folder / task


@pytest.fixture(scope="module")
def run(tmp_path_factory, command_line):
    """A classifier whose texts are in a column of another name."""
    rows = [{"body": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]
    folder = tmp_path_factory.mktemp("runs")
    fields = '{ text = "body" }'
    return train(command_line, folder, "sequence_classification", rows, CLASSES, fields)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Unlabelled records of unequal lengths, with a number each."""
    rows = [{"id": n, "body": TEXTS[n % 6] + "!" * (n % 5)} for n in range(19)]
    return write_rows(tmp_path_factory.mktemp("data") / "new.jsonl", rows)


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_predictions_are_those_of_a_forward_pass_of_each_text(run, records):
    opened = open_model(run)
    found = list(infer_records(opened, records, batch_size=4, echo=["id"]))
    names = ["food", "sport", "weather"]
    for row, record in zip(found, read_rows(records), strict=True):
        assert row["record"] == {"id": record["id"]}
        tokens = torch.tensor([*record["body"].encode(), ByteTokenizer().eos_id])
        scores = opened.model(tokens.unsqueeze(0))[0, -1].softmax(-1)
        assert [*row["scores"]] == names
        torch.testing.assert_close(torch.tensor([*row["scores"].values()]), scores.detach())
        assert row["label"] == names[int(scores.argmax())]


def test_an_interrupted_file_is_continued_byte_for_byte_and_two_ranks_write_the_same(
    run, records, tmp_path, command_line
):
    whole, torn, ranks = (tmp_path / name for name in ("whole.jsonl", "torn.jsonl", "two.jsonl"))
    words = ["infer", run, "--data", records, "--batch-size", 4]
    assert command_line(*words, "--output", whole) == 0
    assert len(read_rows(whole)) == 19
    # Killed within line 7, in the middle of a batch.
    lines = whole.read_bytes().splitlines(keepends=True)
    torn.write_bytes(b"".join(lines[:6]) + lines[6][:9])
    shutil.copy(f"{whole}.origin.json", f"{torn}.origin.json")
    assert command_line(*words, "--output", torn) == 0
    assert torn.read_bytes() == whole.read_bytes()
    done = run_trainer(*words, "--output", ranks, folder=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert ranks.read_bytes() == whole.read_bytes()


def test_a_file_of_another_origin_is_refused_with_what_differs(
    run, records, tmp_path, command_line, capsys
):
    output = tmp_path / "out.jsonl"
    words = ["infer", run, "--data", records, "--output", output]
    assert command_line(*words) == 0
    before = output.read_bytes()
    assert command_line(*words, "--batch-size", 2) == 2
    assert "batch_size was 8 and is 2" in capsys.readouterr().err
    checkpoint = run / "checkpoints" / "step-00000002"
    assert command_line("infer", checkpoint, "--data", records, "--output", output) == 2
    assert "checkpoint was" in capsys.readouterr().err
    assert output.read_bytes() == before
    assert command_line(*words, "--batch-size", 2, "--force") == 0
    assert len(read_rows(output)) == 19
    (tmp_path / "mine.jsonl").write_text("precious\n")
    assert command_line(*words[:-1], tmp_path / "mine.jsonl") == 2
    assert "does not say of what" in capsys.readouterr().err
    assert (tmp_path / "mine.jsonl").read_text() == "precious\n"


def test_what_cannot_be_predicted_is_refused(run, records, tmp_path, command_line, capsys):
    bad = write_rows(tmp_path / "bad.jsonl", [{"body": "x"}, {"bodi": "x"}])
    long = write_rows(tmp_path / "long.jsonl", [{"body": "x" * 99}])
    refusals = {
        (run,): (2, "--data or --source"),
        (run, "--data", tmp_path / "nix.jsonl"): (4, "no such file"),
        (run, "--data", bad): (4, "bad.jsonl:2"),
        (run, "--data", long): (4, "--on-long truncate"),
        (run, "--data", records, "--echo", "idd"): (4, 'no field "idd"'),
        (run, "--data", records, "--set", "feild=x"): (2, "did you mean"),
        (run, "--data", records, "--weights", "ema"): (5, "no averaged weights"),
        (tmp_path, "--data", records): (5, "no checkpoint"),
    }
    for words, (code, message) in refusals.items():
        assert command_line("infer", *words) == code, words
        assert message in capsys.readouterr().err
    assert command_line("infer", run, "--data", bad, "--set", 'on_error="skip"') == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert "label" in first
    assert "bad.jsonl:2" in second["error"]
    assert command_line("infer", run, "--data", long, "--on-long", "truncate") == 0
    assert command_line("generate", run, "--prompt", "x") == 2
    assert "trainer infer" in capsys.readouterr().err


def test_evaluate_has_the_loss_of_the_run_for_every_checkpoint(run, command_line, capfd):
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "eval"]
    assert command_line("evaluate", run, "--every-checkpoint", "--json") == 0
    found = json.loads(capfd.readouterr().out)["checkpoints"]
    assert [each["step"] for each in found] == [row["step"] for row in rows] == [2, 4]
    for row, each in zip(rows, found, strict=True):
        assert each["texts"][0]["loss"] == pytest.approx(row["loss"], rel=1e-6)


@pytest.mark.matrix
def test_evaluate_has_the_loss_of_the_run_on_two_ranks(run, command_line, capfd):
    row = read_rows(run / "metrics.jsonl")[-1]
    assert command_line("evaluate", run, "--json", "--nproc", 2, "--batch", 2) == 0
    (split,) = json.loads(capfd.readouterr().out)["texts"]
    assert (split["samples"], split["loss"]) == (3, pytest.approx(row["loss"], rel=1e-6))


def test_evaluate_measures_labelled_records(run, tmp_path, command_line, capsys):
    rows = [{"body": text, "label": name} for text, name in zip(TEXTS, LABELS, strict=True)]
    data = write_rows(tmp_path / "labelled.jsonl", rows)
    assert command_line("evaluate", run, "--data", data, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["texts"]
    predicted = infer_records(open_model(run), data)
    pairs = zip(predicted, LABELS, strict=True)
    nll = [-torch.tensor(row["scores"][label]).log() for row, label in pairs]
    assert found["loss"] == pytest.approx(torch.stack(nll).mean().item(), rel=1e-5)
    assert found["samples"] == 6


def test_a_preference_run_gives_the_log_probability_of_each_answer(tmp_path, command_line):
    rows = [
        {"prompt": f"{text}? ", "chosen": "yes", "rejected": f"no {number}"}
        for number, text in enumerate([*TEXTS, *TEXTS])
    ]
    run = train(command_line, tmp_path, "preference", rows)
    opened, eos = open_model(run), ByteTokenizer().eos_id
    data = write_rows(tmp_path / "new.jsonl", rows[:3])
    for found, row in zip(infer_records(opened, data), rows, strict=False):
        for side in ("chosen", "rejected"):
            prompt, answer = row["prompt"].encode(), row[side].encode()
            tokens = torch.tensor([*prompt, *answer, eos])
            log_probs = opened.model(tokens[:-1].unsqueeze(0))[0].log_softmax(-1)
            own = log_probs.gather(1, tokens[1:].unsqueeze(1))[len(prompt) - 1 :].sum()
            assert found[side] == pytest.approx(own.item(), rel=1e-5)
    # Files of single answers beside files of pairs, in one batch and with messages.
    pairs = list(infer_records(opened, data))
    texts = [{"prompt": row["prompt"], "answer": row["rejected"]} for row in rows[:3]]
    single = write_rows(tmp_path / "single.jsonl", texts)
    mixed = list(infer_records(opened, [data, single], batch_size=4))
    assert mixed[:3] == [pytest.approx(pair, rel=1e-5) for pair in pairs]
    for row, pair, text in zip(mixed[3:], pairs, texts, strict=True):
        expected = {"log_prob": pair["rejected"], "tokens": len(text["answer"]) + 1}
        assert row == pytest.approx(expected, rel=1e-5)


def test_a_reward_run_scores_single_answers_as_it_scores_pairs(tmp_path, command_line):
    talk = [{"role": "user", "content": "a"}]

    def say(text):
        return [*talk, {"role": "assistant", "content": text}]

    rows = [{"chosen": say("y"), "rejected": say(f"{number}")} for number in range(8)]
    fields = '{ prompt = "" }\ntemplate = "chatml"'
    run = train(command_line, tmp_path, "reward", rows, fields=fields)
    opened = open_model(run)
    pairs = list(infer_records(opened, write_rows(tmp_path / "new.jsonl", rows[:3])))
    texts = [{"answer": row["rejected"]} for row in rows[:3]]
    found = list(infer_records(opened, write_rows(tmp_path / "single.jsonl", texts)))
    assert found == [{"score": pytest.approx(pair["rejected"], rel=1e-5)} for pair in pairs]


def test_a_language_model_scores_texts(tmp_path, command_line):
    rows = [{"text": text * 9} for text in TEXTS]
    run = train(command_line, tmp_path, "language_modeling", rows)
    opened = open_model(run)
    data = write_rows(tmp_path / "new.jsonl", [{"text": "some text"}, {"text": "x"}])
    found = list(infer_records(opened, data))
    for row, text in zip(found, ("some text", "x"), strict=True):
        ids = torch.tensor([ByteTokenizer().eos_id, *text.encode()])
        logits = opened.model(ids[:-1].unsqueeze(0))[0]
        loss = torch.nn.functional.cross_entropy(logits, ids[1:]).item()
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["tokens"] == len(text)
        assert row["perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-5)
    words = ["evaluate", run, "--batch", 2, "--json"]
    one, two = (run_trainer(*words, folder=tmp_path, ranks=ranks) for ranks in (1, 2))
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout


def test_the_best_span_is_the_likeliest_of_all_legal_ones():
    logits = torch.randn(6, 9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start, lengths, longest = torch.tensor([2, 1, 4, 3, 2, 7]), torch.tensor([9, 6, 7, 9, 8, 8]), 3
    for row, found in enumerate(find_spans(logits, start, lengths, longest)):
        length, first = int(lengths[row]), int(start[row])
        p = logits[row, :length].softmax(0)
        spans = {
            (i, j): float(p[i, 0] * p[j, 1])
            for i in range(first, length - 1)
            for j in range(i, min(i + longest, length - 1))
        }
        best = max(spans, key=spans.get, default=None)
        none = float(p[-1, 0] * p[-1, 1])
        if best is None or none >= spans[best]:
            assert found["span"] is None
            assert found["score"] == pytest.approx(none)
        else:
            assert tuple(found["span"]) == best
            assert found["score"] == pytest.approx(spans[best])


def test_an_answer_is_told_in_characters_of_the_context():
    values = {"question": "Où?", "context": "Ada was born in Köln."}
    tokenizer = ByteTokenizer()
    before = len("Où?\nAda was born in".encode())
    found = locate_answer(values, (before, before + 5), tokenizer)
    assert found == {"answer": "Köln", "start": 16, "end": 20}
    assert values["context"][16:20] == "Köln"
    assert locate_answer(values, None, tokenizer)["answer"] == ""
