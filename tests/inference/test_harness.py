"""Our model behind lm-evaluation-harness against the harness's own for transformers."""

import json
import os
import random
import re
import shutil

import pytest

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tests.conversion.models import hf_folder
from trainer.cli.main import main
from trainer.engine.core.errors import RecipeError
from trainer.engine.core.extras import install_command
from trainer.engine.inference.harness import HarnessModel, load_tasks, run_tasks
from trainer.engine.inference.inputs import Dtype
from trainer.engine.inference.open import open_model

SEQ_LEN = 48
WORDS = ["import", "sys", "return", "class", "yield", "None", "lambda", "print", "range", "while"]
TASKS = {
    "choose": """
task: choose
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "read": """
task: read
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    "write": """
task: write
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{expected}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("harness") / "model")


@pytest.fixture(scope="module")
def ours(folder):
    opened = open_model(folder, dtype=Dtype.FP32)
    return HarnessModel(opened.scorer, opened.tokenizer, SEQ_LEN, 4)


@pytest.fixture(scope="module")
def theirs(folder):
    return HFLM(
        pretrained=str(folder), device="cpu", dtype="float32", max_length=SEQ_LEN, batch_size=4
    )


def requests(kind, arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def sentences(count, longest=40):
    chance = random.Random(5)
    return [" ".join(chance.choices(WORDS, k=chance.randrange(1, longest))) for _ in range(count)]


def test_log_likelihoods_are_theirs_also_of_empty_and_of_too_long_contexts(ours, theirs):
    pairs = [(text, " " + word) for text, word in zip(sentences(12), WORDS * 2, strict=False)]
    pairs += [("", "import"), ("trailing space ", "x"), ("a", " many words to go on with")]
    assert max(len(ours.tok_encode(text)) for text, _ in pairs) > SEQ_LEN
    found = ours.loglikelihood(requests("loglikelihood", pairs))
    expected = theirs.loglikelihood(requests("loglikelihood", pairs))
    assert [total for total, _ in found] == pytest.approx([t for t, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_whole_texts_have_their_log_likelihood(ours, theirs):
    texts = [(text,) for text in sentences(6, longest=80)]
    found = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    expected = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    assert found == pytest.approx(expected, rel=1e-5)


def test_generated_texts_are_theirs_and_end_at_the_stop_string(ours, theirs):
    settings = {"until": ["e", "\n\n"], "max_gen_toks": 12}
    prompts = [(text, settings) for text in sentences(6)]
    prompts += [("import", {"until": [], "max_gen_toks": 5})]
    found = ours.generate_until(requests("generate_until", prompts))
    assert found == theirs.generate_until(requests("generate_until", prompts))
    assert all("e" not in text for text in found[:-1])


def test_texts_end_at_each_token_that_the_folder_names_as_an_end(folder, ours, tmp_path):
    prompts = [(text, {"until": [], "max_gen_toks": 12}) for text in sentences(6)]
    whole = ours.generate_until(requests("generate_until", prompts))
    other = shutil.copytree(folder, tmp_path / "model")
    ends = {"eos_token_id": list(range(100, 160))}
    (other / "generation_config.json").write_text(json.dumps(ends))
    opened = open_model(other, dtype=Dtype.FP32)
    model = HarnessModel(opened.scorer, opened.tokenizer, SEQ_LEN, 4)
    found = model.generate_until(requests("generate_until", prompts))
    theirs = HFLM(pretrained=str(other), device="cpu", dtype="float32", max_length=SEQ_LEN)
    assert found == theirs.generate_until(requests("generate_until", prompts))
    assert any(len(text) < len(longer) for text, longer in zip(found, whole, strict=True))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, ours):
    """A folder with three tasks on one small file."""
    folder = tmp_path_factory.mktemp("tasks")
    chance = random.Random(9)
    questions = sentences(10, longest=12)
    answers = ours.generate_until(
        requests("generate_until", [(q, {"until": ["e"], "max_gen_toks": 8}) for q in questions])
    )
    lines = [
        {
            "question": question,
            "choices": [f" {word}" for word in chance.sample(WORDS, 3)],
            "answer": chance.randrange(3),
            "expected": answer if number % 2 else "something else",
        }
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True))
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text + source + "test_split: test\n")
    return folder


def test_tasks_have_the_results_of_the_harness_own_model(ours, theirs, tasks, folder):
    expected = simple_evaluate(
        model=theirs,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
    )["results"]
    found = run_tasks(ours, load_tasks(list(TASKS), tasks, None), 0)
    compared = 0
    for task, metrics in expected.items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                assert found[task][name] == pytest.approx(value, rel=1e-4), (task, name)
                compared += 1
    assert compared == 6
    assert found["write"]["exact_match,none"] == 0.5


def test_command_prints_the_results(folder, tasks, capfd):
    options = f"--include-path {tasks} --limit 4 --num-fewshot 1 --dtype fp32 --json"
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", str(folder), "--tasks", "choose,read", *options.split()])
    assert not stop.value.code
    out = capfd.readouterr().out
    found = json.loads(out)
    assert found["texts"] == []
    assert set(found["tasks"]) == {"choose", "read"}
    assert 0 <= found["tasks"]["choose"]["acc,none"] <= 1


@pytest.mark.matrix  # the harness looks through all of its thousands of tasks
def test_an_unknown_task_is_refused_with_the_nearest_name(tasks):
    with pytest.raises(RecipeError) as error:
        load_tasks(["chose"], tasks, None)
    assert 'did you mean "choose"?' in error.value.render()


def test_without_the_harness_the_command_says_how_to_install_it(folder, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", str(folder), "--tasks", "arc_easy"])
    assert stop.value.code == 3
    assert install_command("eval") in capsys.readouterr().err


def test_a_faulty_task_and_a_missing_folder_are_told(folder, tasks, tmp_path, capfd):
    text = (tasks / "read.yaml").read_text().replace("task: read", "task: faulty")
    assert "doc_to_target: " in text
    text = re.sub(r"doc_to_target: .*", 'doc_to_target: "{{nothing.at.all}}"', text)
    (tmp_path / "faulty.yaml").write_text(text)
    bad = {
        ("faulty", tmp_path): "the tasks cannot be run: UndefinedError: 'nothing' is undefined",
        (",", tmp_path): "--tasks names no task",
        ("faulty", tmp_path / "nix"): f"{tmp_path / 'nix'}: no such folder of tasks",
    }
    for (names, place), message in bad.items():
        with pytest.raises(SystemExit) as stop:
            main(["evaluate", str(folder), "--tasks", names, "--include-path", str(place)])
        assert stop.value.code == 2
        assert message in capfd.readouterr().err
