"""What `validate` and a dry run say of files that are not on this machine."""

import pytest

from tests.download.small_model import make_model
from tests.download.test_download import RECIPE, REPO


@pytest.fixture(scope="module")
def files():
    return make_model()


def test_offline_validate_wants_a_cached_copy(hub, trainer, files, tmp_path):
    hub.commit(REPO, files)
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    (work / "t.txt").write_text("text")
    (work / "r.toml").write_text(RECIPE)
    assert trainer("validate", "r.toml").returncode == 0
    done = trainer("validate", "r.toml", "--offline")
    assert done.returncode == 2
    assert f"r.toml:3:1: run.init_from: {REPO} is not in the cache" in done.stderr
    assert not hub.requests
    assert trainer("download", REPO).returncode == 0
    done = trainer("validate", "r.toml", "--offline")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_dry_run_of_many_ranks_says_what_is_missing(trainer, tmp_path):
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    text = RECIPE.replace('init_from = "tiny/llama-1.5b"\n', "")
    text = text.replace('name = "hf"\npath = "tiny/llama-1.5b"', 'name = "bytes"')
    (work / "r.toml").write_text(text.replace("global_batch = 2", "global_batch = 32"))
    done = trainer("run", "r.toml", "--dry-run", "--world", "16")
    assert done.returncode == 0, done.stderr
    assert "t.txt does not exist on this machine" in done.stderr
    assert "16 ranks = shard 16" in done.stdout
    (work / "some/below").mkdir(parents=True)
    (work / "some/below/t.txt").write_text("text")
    assert trainer("validate", "r.toml", "--set", "data.sources.0.path=some/**/t.txt").stderr == ""
    assert not (work / "runs").exists()
    refused = trainer("run", "r.toml", "--dry-run", "--world", "5")
    assert refused.returncode == 2
    for words in (["--world", "4"], ["--world", "4", "--dry-run", "--replay", "1"]):
        done = trainer("run", "r.toml", *words)
        assert (done.returncode, "--world" in done.stderr) == (2, True), done.stderr
