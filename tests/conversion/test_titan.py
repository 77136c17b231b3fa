"""Checkpoints of torchtitan, written by torch's own DCP, give transformers' logits."""

import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.conversion.models import VARIANTS, transformers_model
from tests.distributed import run_ranks
from tests.formats.hf_folders import config_of
from tests.model_zoo.peers import built
from trainer.engine.assemble.frozen import fingerprint_weights
from trainer.engine.assemble.initial_weights import load_initial_weights
from trainer.engine.checkpoint.chunks import read_dcp
from trainer.engine.checkpoint.reader import load_weights
from trainer.engine.conversion.convert import Options, convert
from trainer.engine.core.errors import CheckpointError
from trainer.engine.recipe.tables import Init

# Module names of torchtitan, and of transformers.
WORDS = [
    (r"model\.embed_tokens", "tok_embeddings"),
    (r"model\.norm", "norm"),
    (r"lm_head", "output"),
    (r"model\.layers", "layers"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.([qkvo])_proj", r"attention.w\1"),
    (r"self_attn\.([qk])_norm", r"attention.\1_norm"),
    (r"self_attn\.q_a_layernorm", "attention.q_norm"),
    (r"self_attn\.q_([ab])_proj", r"attention.wq_\1"),
    (r"self_attn\.kv_a_layernorm", "attention.kv_norm"),
    (r"self_attn\.kv_a_proj_with_mqa", "attention.wkv_a"),
    (r"self_attn\.kv_b_proj", "attention.wkv_b"),
    (r"(?:mlp|feed_forward)\.shared_experts?\.", "moe.shared_experts."),
    (r"(?:mlp\.gate|feed_forward\.router)\.weight", "moe.router.gate.weight"),
    (r"mlp\.gate\.e_score_correction_bias", "moe.expert_bias"),
    (r"(?:mlp|feed_forward)\.experts\.down_proj", "moe.experts.w2"),
    (r"gate_proj", "w1"),
    (r"up_proj", "w3"),
    (r"down_proj", "w2"),
    (r"mlp\.w", "feed_forward.w"),
]
CASES = ["untied", "tied", "qwen3", "deepseek_v3", "experts", "llama4"]


def interleave(weight, heads):
    """Return rows of half-split heads in turns, as torchtitan's complex rotation takes them."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def titan_state(config, theirs):
    """Return transformers' weights by torchtitan's names, in torchtitan's layout."""
    state = {}
    for name, value in theirs.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            block = re.search(r"layers\.\d+\.", name)[0]
            value = value.mT if config.name == "llama4" else value
            for word, half in zip(("w1", "w3"), value.chunk(2, 1), strict=True):
                state[f"{block}moe.experts.{word}"] = half.contiguous()
            continue
        if name.endswith("experts.down_proj") and config.name == "llama4":
            value = value.mT
        if config.name == "llama3" and (found := re.search(r"self_attn\.([qk])_proj", name)):
            value = interleave(value, config.n_heads if found[1] == "q" else config.n_kv_heads)
        for pattern, word in WORDS:
            name = re.sub(pattern, word, name)
        state[name] = value.contiguous()
    return state


def recipe_for(config, path):
    """Write a recipe of the model alone."""

    def lines(table, values):
        nested = {key: value for key, value in values.items() if isinstance(value, dict)}
        yield f"[{table}]"
        for key, value in values.items():
            if key not in nested and value is not None:
                text = str(value).lower() if isinstance(value, bool) else repr(value)
                yield f"{key} = {text}"
        for key, value in nested.items():
            yield from lines(f"{table}.{key}", value)

    sizes = config.model_dump(exclude_unset=True) | {"name": config.name}
    path.write_text("\n".join(["run.steps = 1", *lines("model", sizes)]))
    return path


def logits(model):
    tokens = torch.arange(34).view(2, 17)
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found)


def titan_folder(path, state, prefix=""):
    """Write a step as torchtitan does: the model beside the optimizer's state."""
    beside = {
        "optimizer.state.tok_embeddings.weight.exp_avg": torch.zeros(3),
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": torch.tensor(3)},
    }
    named = {prefix + name: value for name, value in state.items()}
    dcp.save(named | beside, checkpoint_id=path, no_dist=True)
    return path


QUICK = ("untied", "experts")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=() if v in QUICK else pytest.mark.matrix) for v in CASES],
)
def test_a_step_is_converted_and_started_from_with_equal_logits(variant, tmp_path):
    config = config_of(**VARIANTS[variant])
    theirs = transformers_model(config)
    prefix = "model." if variant == "tied" else ""  # as older versions of torchtitan save it
    source = titan_folder(tmp_path / "step-3", titan_state(config, theirs), prefix)
    recipe = recipe_for(config, tmp_path / "model.toml")
    options = Options(recipe=recipe, tokenizer="bytes", verify=True)
    convert("titan2dcp", source, tmp_path / "ours", options)
    converted, started = built(config), built(config)
    load_weights(tmp_path / "ours", converted)
    load_initial_weights(started, config, source, Init())
    for ours in (converted, started):
        torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=1e-5)
    assert fingerprint_weights(source) == fingerprint_weights(source)
    wide_config = config_of(**VARIANTS[variant], vocab_size=328)
    wide = built(wide_config)
    with pytest.raises(CheckpointError, match="fewer tokens") as refused:
        load_initial_weights(wide, wide_config, source)
    assert "model.vocab_size = 320" in refused.value.hint
    load_initial_weights(wide, wide_config, source, may_grow=True)
    embed, mean = wide.embed.weight, started.embed.weight.mean(0)
    assert torch.equal(embed[:320], started.embed.weight)
    torch.testing.assert_close(embed[320:], mean.expand(8, -1), rtol=0, atol=1e-6)


def test_biases_of_experts_are_read_and_what_differs_is_listed(tmp_path):
    plain = config_of(**VARIANTS["experts"])
    state = titan_state(plain, transformers_model(plain))
    biases = {f"layers.{i}.moe.expert_bias": torch.arange(5) / 8 for i in range(2)}
    source = titan_folder(tmp_path / "step-3", state | biases)
    sizes = VARIANTS["experts"]
    config = config_of(**{**sizes, "moe": {**sizes["moe"], "balance_bias": True}})
    ours = built(config)
    load_initial_weights(ours, config, source, Init())
    assert ours.layers[1].mlp.router.bias.tolist() == [0, 0.125, 0.25, 0.375, 0.5]
    model = built(plain)
    before = model.embed.weight.clone()
    with pytest.raises(CheckpointError, match="expert_bias is in the folder") as error:
        load_initial_weights(model, plain, source, Init())
    assert "model.moe.balance_bias = true" in error.value.hint
    assert torch.equal(model.embed.weight, before)
    wide = {**sizes["moe"], "balance_bias": True, "expert_ffn_dim": 28}
    other = config_of(**{**sizes, "moe": wide})
    with pytest.raises(CheckpointError, match=r"w1 is \[5, 24, 32\] there and \[5, 28, 32\] here"):
        load_initial_weights(built(other), other, source, Init())
    mixtral = config_of(**VARIANTS["mixtral"])
    with pytest.raises(CheckpointError, match='names are not known for "mixtral"'):
        load_initial_weights(built(mixtral), mixtral, source, Init())
    with pytest.raises(CheckpointError, match="does not say how large its model is"):
        convert("titan2dcp", source, tmp_path / "ours", Options())


def save_shards(folder):
    mesh = init_device_mesh("cpu", (2,))
    embedding = torch.arange(14.0).view(7, 2)
    weights = {"tok_embeddings.weight": embedding, "norm.weight": torch.ones(3)}
    shards = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in weights.items()}
    dcp.save(shards, checkpoint_id=folder)


@pytest.mark.matrix
def test_what_two_ranks_wrote_is_put_together(tmp_path):
    run_ranks(2, save_shards, str(tmp_path / "step-1"))
    found = read_dcp(tmp_path / "step-1")
    embedding = found["tok_embeddings.weight"]
    assert embedding.shape == (7, 2)
    assert embedding.read(1, 6).flatten().tolist() == list(range(2, 12))
    assert found["norm.weight"].read(0, 3).tolist() == [1, 1, 1]


class Evil:
    def __reduce__(self):
        return Path.touch, (Path(RAN),)


RAN = "ran-by-a-checkpoint"


def test_a_table_of_contents_runs_no_code_and_leads_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"tok_embeddings.weight": torch.ones(4, 2)}
    source = titan_folder(tmp_path / "step-1", state)
    table = source / ".metadata"
    metadata = pickle.loads(table.read_bytes())

    def refused(changed, reason):
        table.write_bytes(pickle.dumps(changed))
        with pytest.raises(CheckpointError, match=reason):
            read_dcp(source)

    assert isinstance(metadata, Metadata)
    (place,) = [info for index, info in metadata.storage_data.items() if index.offset == (0, 0)]
    place.relative_path = "../step-1/__0_0.distcp"
    refused(metadata, "points to")
    place.relative_path = "__0_0.distcp"
    metadata.state_dict_metadata["tok_embeddings.weight"].size = torch.Size([5, 2])
    refused(metadata, "do not make it up")
    metadata.planner_data = Evil()
    refused(metadata, "refused")
    refused([1], "no table of contents")
    assert not Path(RAN).exists()
    table.unlink()
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        read_dcp(source)
