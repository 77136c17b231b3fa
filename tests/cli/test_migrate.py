"""`trainer migrate`: what becomes of the settings of other trainers."""

import json

import pytest

from tests.conversion.models import hf_folder
from trainer.cli.main import _run
from trainer.engine.recipe.load import load_recipe

TITAN = """
[job]
description = "Llama 3 debug training"
[profiling]
enable_profiling = false
profile_freq = 10
[model]
name = "llama3"
flavor = "debugmodel"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 8e-4
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
[training]
local_batch_size = 8
seq_len = 2048
max_norm = 1.0
steps = 10
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
fsdp_reshard_after_forward = "never"
[checkpoint]
enable = false
interval = 10
async_mode = "async_with_pinned_mem"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[validation]
enable = true
dataset = "c4_validation"
freq = 5
steps = 10
"""
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
datasets:
  - path: talks.jsonl
    type: chat_template
  - path: org/talks
    name: short
    type: sharegpt
  - path: talks.parquet
    type: chat_template
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
val_set_size: 0.05
adapter: lora
lora_r: 32
lora_dropout: 0.05
peft_use_dora: true
sequence_len: 1024
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
evals_per_epoch: 4
"""
TRAINER = """
model_name_or_path: gpt2
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
learning_rate: 5.0e-5
adam_beta2: 0.95
max_steps: 1000
warmup_ratio: 0.1
lr_scheduler_type: cosine
optim: sgd_of_mine
bf16: true
save_strategy: epoch
report_to: [tensorboard, wandb]
seed: !!python/name:os.system
"""


@pytest.fixture
def migrate(tmp_path, capsys, monkeypatch):
    """Migrate a text; return the recipe that was written, and the settings that were left."""
    monkeypatch.chdir(tmp_path)

    def migrate(name, text, *words):
        (tmp_path / name).write_text(text)
        assert _run(["migrate", name, "--json", *words]) == 0
        report = json.loads(capsys.readouterr().out)
        return load_recipe(report["recipe"]).recipe, {each["setting"] for each in report["left"]}

    return migrate


def test_torchtitan(migrate):
    recipe, left = migrate("titan.toml", TITAN, "--world", "4")
    assert (recipe.model.name, recipe.model.flavor) == ("llama3", "debug")
    assert (recipe.optimizer.name, recipe.optimizer.lr, recipe.optimizer.clip_norm) == (
        "adamw", 8e-4, 1.0,
    )  # fmt: skip
    assert (recipe.data.micro_batch, recipe.data.global_batch, recipe.data.seq_len) == (8, 32, 2048)
    assert (recipe.data.sources[0].repo, recipe.data.sources[0].config) == ("allenai/c4", "en")
    assert (recipe.schedule.warmup_steps, recipe.schedule.decay_fraction) == (2, 0.8)
    assert (recipe.parallel.shard, recipe.parallel.tensor) == (-1, 2)
    assert recipe.parallel.fsdp.strategy == "shard_grad_op"
    assert (recipe.checkpoint.interval, recipe.checkpoint.mode) == (0, "async_pinned")
    assert (recipe.evaluate.interval, recipe.evaluate.steps, recipe.run.steps) == (5, 10, 10)
    assert recipe.memory.recompute == "selective"
    assert left == {
        "job.description", "model.converters", "activation_checkpoint.selective_ac_option",
        "validation.dataset",
    }  # fmt: skip


def test_axolotl_with_the_folder_of_its_model(migrate, tmp_path):
    folder = hf_folder(tmp_path / "hf")
    recipe, left = migrate("axolotl.yml", AXOLOTL, "--from-hf", str(folder))
    assert recipe.run.init_from == str(folder)
    assert recipe.tokenizer.name == "hf"
    assert (recipe.data.micro_batch, recipe.data.global_batch) == (2, 8)
    assert (recipe.run.epochs, recipe.evaluate.interval_epochs) == (3, 0.25)
    assert (recipe.data.sources[0].name, recipe.data.packing) == ("chat", "documents")
    lines, hub, table = recipe.data.sources
    assert (lines.path.rpartition("/")[2], hub.repo, hub.config) == (
        "talks.jsonl",
        "org/talks",
        "short",
    )
    assert (hub.name, hub.field, table.name) == ("chat", "conversations", "chat")
    assert table.path.endswith("talks.parquet")
    assert (recipe.lora.rank, recipe.memory.recompute) == (32, "full")
    assert (recipe.lora.dropout, recipe.lora.dora) == (0.05, True)
    assert (recipe.optimizer.name, recipe.schedule.name) == ("adamw", "cosine")
    assert left == {"datasets"}


def test_hugging_faces_trainer(migrate):
    text = TRAINER.replace("!!python/name:os.system", "42")
    recipe, left = migrate("trainer.yaml", text)
    assert (recipe.optimizer.lr, recipe.optimizer.betas) == (5e-5, (0.9, 0.95))
    assert (recipe.run.steps, recipe.schedule.warmup_steps) == (1000, 100)
    assert (recipe.data.global_batch, recipe.precision.compute) == (16, "bf16")
    assert (recipe.checkpoint.interval_epochs, recipe.metrics.tensorboard) == (1.0, True)
    assert left == {"model_name_or_path", "optim", "report_to"}


def test_what_the_recipe_refuses_is_left_and_the_rest_is_valid(migrate):
    text = "[training]\nsteps = 10\nseq_len = -4\n[optimizer]\nname = 'AdamW'\nlr = 'fast'\n"
    recipe, left = migrate("odd.toml", text)
    assert left == {"data.seq_len", "optimizer.lr"}
    assert recipe.run.steps == 10


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


MERGES = "m0: &m0 {a: 1, b: 2, c: 3}\n" + "".join(
    f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)


@pytest.mark.parametrize("value", ["mine/data", "[mine/data, 3, null]", "true"])
def test_datasets_of_another_form_are_left(migrate, value):
    recipe, left = migrate("datasets.yaml", f"max_steps: 7\ndatasets: {value}\n")
    assert recipe.run.steps == 7
    assert left <= {"datasets", "data.sources.1", "data.sources.0"}


def test_settings_that_the_recipe_refuses_are_not_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("max_steps: 7\nlearning_rate: fast\n")
    assert _run(["migrate", "a.yaml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["carried"], [each["setting"] for each in report["left"]]) == (
        1,
        ["optimizer.lr"],
    )


def test_a_name_with_a_line_end_stays_a_comment(migrate):
    recipe, _ = migrate("a\nsteps = 9.yaml", "max_steps: 7\n")
    assert recipe.run.steps == 7


def test_endless_yaml_is_left_out(migrate):
    recipe, left = migrate("laughs.yaml", f"max_steps: 7\nseed: &a [*a]\n{LAUGHS}")
    assert recipe.run.steps == 7
    assert {"seed", "a11"} <= left


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRAINER, "is not YAML: could not determine a constructor"),
        ("- a\n- b\n", "expected a table of settings"),
        ("a: [1\n", "is not YAML"),
        ("[" * 5000, "is not YAML: "),
        ("a: 1\n" + "x" * 1_000_001, "is larger than"),
        ('steps: !!int ""\n', "a value does not fit its tag"),
        ("steps: !!timestamp soon\n", "a value does not fit its tag"),
        (MERGES, "merge keys make more than 2,000 settings"),
    ],
)
def test_no_code_is_run_and_bad_files_are_refused(tmp_path, capsys, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    assert _run(["migrate", "bad.yaml"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "unexpected" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_a_file_that_is_there_is_not_replaced(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("max_steps: 3\n")
    (tmp_path / "mine-recipe.toml").write_text("kept")
    assert _run(["migrate", "mine.yaml"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "mine-recipe.toml").read_text() == "kept"
    assert _run(["migrate", "mine.yaml", "--force"]) == 0
