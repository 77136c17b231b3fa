"""Models of the Hugging Face hub are downloaded, checked, resumed and taken where folders are."""

import json
import os
import random

import pytest
import tomli

from tests.cases import also
from tests.download.small_model import make_model
from trainer.engine.download.hub_ids import HubId, parse_hub_id

REPO = "tiny/llama-1.5b"
RECIPE = """\
[run]
steps = 2
init_from = "tiny/llama-1.5b"
[model]
name = "llama3"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 48
vocab_size = 257
norm_eps = 1e-6
rope_theta = 10000.0
[tokenizer]
name = "hf"
path = "tiny/llama-1.5b"
[data]
seq_len = 32
global_batch = 2
micro_batch = 2
[[data.sources]]
name = "text"
path = "t.txt"
[evaluate]
interval = 0
"""


@pytest.fixture(scope="module")
def files():
    return make_model()


def served(hub):
    return [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def test_a_path_is_never_taken_for_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_hub_id("Qwen/Qwen2.5-0.5B") == HubId("Qwen/Qwen2.5-0.5B")
    assert parse_hub_id("a/b@refs/pr/1") == HubId("a/b", "refs/pr/1")
    for text in ("./a/b", "/a/b", "~/a", "a", "a/b/c", "a/b.json", "a/b.gguf", "runs/x", ""):
        assert parse_hub_id(text) is None, text
    (tmp_path / "Qwen").mkdir()
    assert parse_hub_id("Qwen/Qwen2.5-0.5B") is None  # a folder of that name is here
    assert parse_hub_id("Qwen/Qwen2.5-0.5B", tmp_path / "Qwen") is not None


def test_download_writes_the_files_and_names_the_commit(hub, trainer, files, tmp_path):
    commit = hub.commit(REPO, files)
    done = trainer("download", REPO, "--to", "assets/tiny", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["id"] == f"{REPO}@{commit}"
    folder = tmp_path / "work/assets/tiny"
    found = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    assert found == {name: files[name] for name in files if "/" not in name and name != "README.md"}
    hub.requests.clear()
    again = trainer("download", REPO, "--to", "assets/tiny")
    assert again.returncode == 0
    assert f"pinned: {REPO}@{commit}" in again.stdout
    assert not served(hub)


def test_include_names_other_files(hub, trainer, files, tmp_path):
    hub.commit(REPO, files)
    done = trainer("download", REPO, "--to", "x", "--include", "original/*")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work/x/original/weights.bin").read_bytes() == b"not needed"
    none = trainer("download", REPO, "--include", "*.gguf")
    assert none.returncode == 4
    assert "no file is *.gguf; there is: README.md" in none.stderr


def test_a_broken_connection_is_resumed_with_a_range(hub, trainer, tmp_path):
    content = random.Random(0).randbytes(48 * 2**20)  # the hub's library writes 10 MB at a time
    hub.commit(REPO, {"model.safetensors": content})
    hub.cut.add("model.safetensors")
    done = trainer("download", REPO, "--to", "x")
    if done.returncode:  # the hub's library may leave the second try to the user
        assert done.returncode == 3, done.stderr
        assert "Traceback" not in done.stderr
        done = trainer("download", REPO, "--to", "x")
    assert done.returncode == 0, done.stderr
    starts = [int(each[6:].split("-")[0]) for _, _, each in hub.requests if each]
    assert any(0 < start <= len(content) // 2 for start in starts)
    assert (tmp_path / "work/x/model.safetensors").read_bytes() == content


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("model.safetensors", ["--to", "x"]),
        ("config.json", []),
        *also(("model.safetensors", []), ("config.json", ["--to", "x"])),
    ],
)
def test_wrong_content_is_refused_and_deleted(hub, trainer, files, name, to):
    hub.commit(REPO, files)
    hub.spoiled.add(name)
    done = trainer("download", REPO, *to)
    assert done.returncode == 4
    assert f"{name} has the sha" in done.stderr
    assert "it was deleted" in done.stderr
    hub.spoiled.clear()
    assert trainer("download", REPO, *to).returncode == 0


@pytest.mark.parametrize("to", [[], ["--to", "x"]])
def test_what_was_damaged_on_disk_is_downloaded_again(hub, trainer, files, tmp_path, to):
    hub.commit(REPO, files)
    assert trainer("download", REPO, *to).returncode == 0
    (weights,) = (path for path in tmp_path.rglob("model.safetensors") if path.is_symlink() or to)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    done = trainer("download", REPO, *to)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors has the sha256" in done.stderr
    assert weights.read_bytes() == files["model.safetensors"]


def test_a_folder_takes_the_files_of_a_newer_commit_and_links_lead_to_what_they_did(
    hub, trainer, files, tmp_path
):
    hub.commit(REPO, files)
    assert trainer("download", REPO, "--to", "x").returncode == 0
    weights, mine = tmp_path / "work/x/model.safetensors", tmp_path / "mine"
    weights.rename(mine)
    weights.symlink_to(mine)
    newer = make_model(seed=1)
    assert len(newer["model.safetensors"]) == len(files["model.safetensors"])
    commit = hub.commit(REPO, newer)
    done = trainer("download", REPO, "--to", "x")
    assert done.returncode == 0, done.stderr
    assert f"pinned: {REPO}@{commit}" in done.stdout
    assert weights.read_bytes() == newer["model.safetensors"]
    assert mine.read_bytes() == files["model.safetensors"]


def test_without_the_hub_nothing_is_said_to_be_compared(hub, trainer, files, tmp_path):
    commit = hub.commit(REPO, files)
    assert trainer("download", REPO).returncode == 0
    for record in (tmp_path / "cache").rglob("*.json"):
        record.unlink()  # as if another program had filled the hub's cache
    for words in ([], ["--to", "x"]):
        done = trainer("download", f"{REPO}@{commit}", *words, HF_HUB_OFFLINE="1")
        assert (done.returncode, done.stdout) == (3, ""), done.stderr


def test_bad_revisions_and_unusable_caches_are_named(hub, trainer, files, tmp_path):
    hub.commit(REPO, files)
    done = trainer("download", REPO, "--revision", "../../x")
    assert done.returncode == 2
    assert f'"{REPO}@../../x" is no id' in done.stderr
    (tmp_path / "file").touch()
    done = trainer("download", REPO, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert done.returncode == 3, done.stderr
    assert "set XDG_CACHE_HOME" in done.stderr


def test_errors_of_the_hub_are_explained(hub, trainer, files):
    hub.commit(REPO, files)
    hub.gated.add("closed/model")
    for words, code, text in (
        (["no/such"], 4, "no such model on the Hugging Face hub"),
        ([f"{REPO}@v9"], 4, "has no revision 'v9'"),
        (["closed/model"], 3, "asks for consent"),
        (["justone"], 2, "is no id of the Hugging Face hub"),
    ):
        done = trainer("download", *words)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert text in done.stderr


@pytest.mark.parametrize(
    "setting", [{"HF_HUB_OFFLINE": "1"}, *also({"HF_ENDPOINT": "http://127.0.0.1:9"})]
)
def test_offline_the_cache_is_taken_or_the_way_is_named(hub, trainer, files, setting):
    commit = hub.commit(REPO, files)
    done = trainer("generate", REPO, "--max-new-tokens", "4", "--temperature", "0", **setting)
    assert done.returncode == 3
    assert f"trainer download {REPO} --to assets/..." in done.stderr
    online = trainer("generate", REPO, "--max-new-tokens", "4", "--temperature", "0")
    assert online.returncode == 0, online.stderr
    done = trainer("generate", REPO, "--max-new-tokens", "4", "--temperature", "0", **setting)
    assert done.returncode == 0, done.stderr
    assert done.stdout == online.stdout
    assert f"{REPO}@{commit} is taken from the cache" in done.stderr


def test_an_id_gives_what_its_folder_gives(hub, trainer, files, tmp_path):
    hub.commit(REPO, files)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in files.items():
        if "/" not in name:
            (folder / name).write_bytes(content)
    words = ["--max-new-tokens", "8", "--temperature", "0", "--prompt", "ab"]
    outputs = [trainer("generate", place, *words) for place in (REPO, folder)]
    assert outputs[0].returncode == outputs[1].returncode == 0, outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout
    done = trainer("convert-ckpt", "hf2hf", REPO, "copy")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work/copy/tokenizer.json").read_bytes() == files["tokenizer.json"]
    done = trainer("checkpoint", "inspect", REPO, "--tensors")
    assert done.returncode == 0, done.stderr
    assert "lm_head.weight  F32 [257, 32]" in done.stdout
    done = trainer("new", "r.toml", "--from-hf", REPO)
    assert done.returncode == 0, done.stderr
    assert trainer("validate", "r.toml").returncode == 0


@pytest.mark.matrix
def test_a_run_records_the_commit_and_resumes_with_it(hub, trainer, files, tmp_path):
    commit = hub.commit(REPO, files)
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    (work / "t.txt").write_text("some text to learn from\n" * 200)
    (work / "r.toml").write_text(RECIPE)
    done = trainer("run", "r.toml", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    weights = [path for path in served(hub) if path.endswith("model.safetensors")]
    assert len(weights) == 1  # of two ranks, one downloads
    questions = [path for _, path, _ in hub.requests if path == f"/api/models/{REPO}"]
    assert len(questions) == 2, hub.requests  # one for each key that names the model
    recorded = tomli.loads((work / "runs/r/recipe.toml").read_text())
    assert recorded["run"]["init_from"] == f"{REPO}@{commit}"
    assert recorded["tokenizer"]["path"] == f"{REPO}@{commit}"
    hub.commit(REPO, make_model(seed=1) | {"new.json": b"{}"})
    hub.requests.clear()
    done = trainer("run", "r.toml", "--set", "run.steps=3", "--allow-changed", "run.steps")
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stderr + done.stdout
    replayed = trainer("run", "r.toml", "--set", "run.steps=3", "--replay", "step:1", "--json")
    assert replayed.returncode == 0, replayed.stderr
    found = json.loads(replayed.stdout)
    assert found["loss"] == found["target"]["recorded"]["loss"]
    assert not hub.requests
    assert tomli.loads((work / "runs/r/recipe.toml").read_text())["run"]["init_from"].endswith(
        commit
    )
    os.rename(tmp_path / "hf", tmp_path / "hf-away")
    done = trainer("generate", "runs/r", "--max-new-tokens", "2")  # downloads the tokenizer again
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(f"/{REPO}/resolve/{commit}/") for path in served(hub))
