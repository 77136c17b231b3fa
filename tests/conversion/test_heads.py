"""Models with a task's head against transformers' classes for it, through folders both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from tests.conversion.models import ALSO, VARIANTS
from tests.formats.hf_folders import config_of, empty_model
from trainer.engine.assemble.initial_weights import load_initial_weights
from trainer.engine.conversion.convert import Options, convert
from trainer.engine.conversion.export import export_huggingface
from trainer.engine.conversion.peft import save_adapter
from trainer.engine.core.errors import CheckpointError
from trainer.engine.formats.hf_load import load_huggingface
from trainer.engine.inference.open import open_model
from trainer.engine.lora.apply import add_adapters
from trainer.engine.lora.peft_folder import load_adapter
from trainer.engine.lora.tables import LoRA
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.model_zoo.heads import HeadSettings
from trainer.model_zoo.sizes import SettingsError

HEADS = {
    "sequence": HeadSettings(outputs=3, labels=("a", "b", "c")),
    "regression": HeadSettings(outputs=1, problem="regression"),
    "token": HeadSettings(kind="token_classification", outputs=5, bias=True, dropout=0.25),
    "answers": HeadSettings(kind="question_answering", outputs=2, bias=True),
}
NO_TOKENS = ("llama4", "deepseek_v2", "olmo2", "gemma3")
ANSWERS = ("tied", "qwen3", "experts", "mixtral", "mistral", "qwen2")
CASES = [
    pytest.param(variant, head, marks=[pytest.mark.matrix] if variant in ALSO else [])
    for variant, head in (
        *((variant, "sequence") for variant in VARIANTS if variant != "llama4"),
        *((variant, "token") for variant in VARIANTS if variant not in NO_TOKENS),
        *((variant, "answers") for variant in ANSWERS),
        ("untied", "regression"),
    )
]


def random_model(head: HeadSettings | None, **changes: Any) -> Any:
    config = config_of(**changes).with_head(head)
    model = empty_model(config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        is_norm = name.endswith("norm.weight")
        middle = model.initial_values(name).value if is_norm else 0.0
        nn.init.normal_(parameter, middle, 0.2, generator=generator)
    for buffer in model.saved_buffers().values():
        nn.init.normal_(buffer, 0.0, 0.2, generator=generator)
    return model.eval(), config


def export(folder: Path, model: Any, config: Any) -> Path:
    saved = model.saved_buffers()
    named = {name: buffer for name, buffer in saved.items() if config.layout.to_hf(name)}
    export_huggingface(folder, dict(model.named_parameters()) | named, config, ByteTokenizer())
    return folder


def logits_of(theirs: Any, tokens: torch.Tensor) -> torch.Tensor:
    out = theirs(tokens)
    if hasattr(out, "start_logits"):
        return torch.stack([out.start_logits, out.end_logits], -1)
    return out.logits


@pytest.mark.parametrize(("variant", "kind"), CASES)
def test_logits_and_gradients_equal_those_of_transformers(
    tmp_path: Path, variant: str, kind: str
) -> None:
    model, config = random_model(HEADS[kind], **VARIANTS[variant])
    folder = export(tmp_path / "ours", model, config)
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    theirs, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"] | info["mismatched_keys"]
    theirs.eval()
    tokens = torch.randint(config.vocab, (1, 40), generator=torch.Generator().manual_seed(1))
    ours, other = model(tokens), logits_of(theirs, tokens)
    # Sequence classification reads the last token's.
    ours = ours[:, -1] if other.dim() == 2 else ours
    torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)
    ours.square().sum().backward()
    other.square().sum().backward()
    layer = getattr(theirs, config.task_head.layer)
    pairs = [(model.embed, theirs.get_input_embeddings())]
    pairs += [(model.head.get_submodule(config.task_head.layer), layer)]
    for mine, their in pairs:
        for one, two in zip(mine.parameters(), their.parameters(), strict=True):
            assert (one.grad - two.grad).norm() < 1e-4 * two.grad.norm()

    theirs.save_pretrained(tmp_path / "theirs")
    settings = json.loads((tmp_path / "theirs" / "config.json").read_text())
    read = type(config).from_hf_config(settings)
    assert read.task_head == config.task_head
    assert read.hf_config()["architectures"] == [name]
    again = empty_model(read)
    assert load_huggingface(tmp_path / "theirs", again, read) == []
    for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_language_model_gives_its_body_and_the_layer_stays_as_it_is(tmp_path: Path) -> None:
    body, config = random_model(None, tie_embeddings=False)
    folder = export(tmp_path / "hf", body, config)
    config = config.with_head(HEADS["sequence"])
    model = empty_model(config)
    (note,) = load_huggingface(folder, model, config, fresh_head=True)
    assert note == "the folder holds no head.score.weight: new ones are trained"
    assert (model.head.score.weight == 7.0).all()
    assert torch.equal(model.head.norm.weight, body.head.norm.weight)
    assert torch.equal(model.layers[1].mlp.up.weight, body.layers[1].mlp.up.weight)
    with pytest.raises(CheckpointError, match=r"score\.weight \(head\.score\.weight here\) is not"):
        load_huggingface(folder, model, config)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    body, config = random_model(None, name="deepseek_v3", mtp_depth=1)
    folder = export(tmp_path / "hf", body, config)
    config = config.with_head(HEADS["sequence"])
    assert config.num_blocks == 2
    assert len(load_huggingface(folder, empty_model(config), config, fresh_head=True)) == 1


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        (
            HEADS["sequence"],
            HeadSettings(outputs=3, labels=("b", "a", "c")),
            r'the labels are \["b", "a", "c"\], config.json says \["a", "b", "c"\]',
        ),
        (
            HEADS["sequence"],
            HeadSettings(outputs=4),
            r"score.weight is \[3, 32\] there and \[4, 32\] here \(head.score.weight\)",
        ),
        (HEADS["sequence"], HEADS["answers"], "score.weight is in the folder but not in the model"),
        (HEADS["sequence"], HEADS["token"], r"score.bias \(head.score.bias here\) is not in"),
    ],
)
def test_another_head_is_refused(
    tmp_path: Path, there: HeadSettings, here: HeadSettings, message: str
) -> None:
    model, config = random_model(there)
    folder = export(tmp_path / "hf", model, config)
    config = config.with_head(here)
    with pytest.raises(CheckpointError, match=message):
        load_huggingface(folder, empty_model(config), config, fresh_head=True)


@pytest.mark.parametrize(
    ("changes", "head", "message"),
    [
        ({"name": "llama4"}, HEADS["sequence"], "transformers has no Llama4ForSequenceClass"),
        ({"name": "gpt_oss"}, HEADS["answers"], "transformers has no GptOssForQuestionAnswering"),
        ({}, HeadSettings(outputs=2, bias=True), "its score layer has no bias"),
    ],
)
def test_a_head_that_transformers_does_not_have_is_not_exported(
    tmp_path: Path, changes: dict[str, Any], head: HeadSettings, message: str
) -> None:
    model, config = random_model(head, **changes)
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "hf", model, config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"id2label": {"0": "a", "2": "b"}},
        {"id2label": {"0": 3}},
        {"id2label": ["a"]},
        {"id2label": None, "num_labels": -1},
        {"problem_type": "other"},
        {"problem_type": ["other"]},
    ],
)
def test_a_config_json_with_an_impossible_head_is_refused(wrong: dict[str, Any]) -> None:
    config = config_of().with_head(HEADS["sequence"])
    with pytest.raises(SettingsError, match=next(key for key in reversed(wrong)).split("_")[0]):
        type(config).from_hf_config({**config.hf_config(), **wrong})


def test_a_run_with_a_head_starts_from_a_checkpoint_of_a_language_model(tmp_path: Path) -> None:
    body, config = random_model(None, name="deepseek_v3", mtp_depth=1)
    convert("hf2dcp", export(tmp_path / "hf", body, config), tmp_path / "step-5", Options())
    config = config.with_head(HEADS["sequence"])
    model = empty_model(config)
    notes = load_initial_weights(model, config, tmp_path / "step-5")
    assert notes == [
        f"weights from {tmp_path / 'step-5'} (step 5)",
        "the checkpoint holds no head.score.weight: new ones are trained",
    ]
    assert (model.head.score.weight == 7.0).all()
    found, expected = model.state_dict(), body.state_dict()
    shared = found.keys() & expected.keys()
    assert found.keys() - shared == {"head.score.weight"}
    assert all(torch.equal(found[name], expected[name]) for name in shared)


def test_adapters_leave_the_layer_of_a_head_trainable() -> None:
    model, config = random_model(HeadSettings(outputs=3, bias=True))
    line = add_adapters(model, config.layout, LoRA(rank=2, targets=["*.q.weight"]))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    adapters = {f"layers.{i}.attention.q.lora_{x}" for i in (0, 1) for x in "ab"}
    assert trained == {"head.score.weight", "head.score.bias", *adapters}
    assert f"{2 * 2 * (32 + 32) + 3 * 33:,} parameters are trained" in line


@pytest.mark.parametrize("kind", ["sequence", "token", "answers"])
def test_peft_loads_adapters_with_the_layer_of_the_head_and_back(tmp_path: Path, kind: str) -> None:
    model, config = random_model(HEADS[kind], **VARIANTS["tied"])
    base = export(tmp_path / "base", model, config)
    table = LoRA(rank=2, alpha=4.0, targets=["*.q.weight"])
    add_adapters(model, config.layout, table)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    with torch.no_grad():
        for number, weight in enumerate(trained):
            generator = torch.Generator().manual_seed(number)
            weight.copy_(torch.randn(weight.shape, generator=generator))
    save_adapter(tmp_path / "adapter", model, config, table, base=str(base))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == [config.task_head.layer]
    name = json.loads((base / "config.json").read_text())["architectures"][0]
    theirs = getattr(transformers, name).from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    tokens = torch.randint(config.vocab, (1, 9), generator=torch.Generator().manual_seed(1))
    other = logits_of(adapted, tokens)
    ours = model(tokens)
    torch.testing.assert_close(ours[:, -1] if other.dim() == 2 else ours, other)
    adapted.save_pretrained(tmp_path / "theirs")
    for folder in ("adapter", "theirs"):
        again, _ = random_model(HEADS[kind], **VARIANTS["tied"])
        add_adapters(again, config.layout, table)
        load_adapter(tmp_path / folder, again, config, table)
        found = [weight for weight in again.parameters() if weight.requires_grad]
        assert all(map(torch.equal, found, trained))
    plain, config = random_model(None, **VARIANTS["tied"])
    add_adapters(plain, config.layout, table)
    with pytest.raises(CheckpointError, match="modules_to_save"):
        load_adapter(tmp_path / "adapter", plain, config, table)


@pytest.mark.parametrize(("variant", "kind"), [*CASES[:1], ("tied", "answers"), CASES[-1]])
def test_folders_become_checkpoints_of_their_task_and_folders_again(
    tmp_path: Path, variant: str, kind: str
) -> None:
    model, config = random_model(HEADS[kind], **VARIANTS[variant])
    folder = export(tmp_path / "hf", model, config)
    convert("hf2dcp", folder, tmp_path / "step-1", Options(verify=True))
    opened = open_model(tmp_path / "step-1", dtype="fp32")
    assert opened.recipe.task.name == HEADS[kind].kind
    tokens = torch.arange(40).view(1, 40)
    for each in (opened, open_model(folder, dtype="fp32")):
        assert torch.equal(each.model(tokens), model(tokens))
    convert("dcp2hf", tmp_path / "step-1", tmp_path / "back", Options(verify=True))
    written, first = (tmp_path / place for place in ("back", "hf"))
    assert json.loads((written / "config.json").read_text()) == json.loads(
        (first / "config.json").read_text()
    )
    assert (written / "model.safetensors").read_bytes() == (
        first / "model.safetensors"
    ).read_bytes()


def test_a_folder_whose_head_no_task_trains_is_refused(tmp_path: Path) -> None:
    head = HeadSettings(kind="token_classification", outputs=3, dropout=0.1)
    model, config = random_model(head)
    folder = export(tmp_path / "hf", model, config)
    with pytest.raises(CheckpointError, match="fits no task: the head of token_class"):
        convert("hf2dcp", folder, tmp_path / "step-1", Options())
