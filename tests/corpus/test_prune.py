"""`trainer cache`: what is listed, what is deleted, and what stays."""

import json
import os
import subprocess
import sys
import time

import pytest

from trainer.cli.main import main
from trainer.engine.corpus.cache import hold_lock
from trainer.engine.corpus.prepare import open_or_prepare
from trainer.engine.corpus.prune import delete_entry, list_entries
from trainer.engine.sources.configs import JsonlSource, TextSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

HASH = "0123456789abcdef" * 2


@pytest.fixture
def cache(tmp_path):
    """A cache with tokens of two sources, unused for 1 and 9 days, and something else."""
    folder = tmp_path / "cache"
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "b.txt").write_text("other words")
    json_lines = JsonlSource(path=str(tmp_path / "a.jsonl"))
    for days, source in ((9, json_lines), (1, TextSource(path=str(tmp_path / "b.txt")))):
        open_or_prepare(source.for_tokenizer(ByteTokenizer()), ByteTokenizer(), folder)
        (entry,) = [entry for entry in list_entries(folder) if entry.source.startswith(source.name)]
        then = time.time() - days * 24 * 3600
        os.utime(entry.path, (then, then))
    (folder / f"records-{HASH}.unfinished").mkdir()
    for other in (f"mine-{HASH}", "photos", f"{HASH}.unfinished"):
        (folder / other).mkdir()
        (folder / other / "precious").touch()
    return folder


def call(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(["cache", *map(str, words)])
    return int(stop.value.code or 0), capsys.readouterr()


def test_what_is_old_or_too_much_goes_and_what_is_no_store_stays(cache, capsys):
    words = "--cache-dir", cache
    code, said = call(capsys, "list", *words, "--json")
    rows = json.loads(said.out)
    assert code == 0
    assert [row["kind"] for row in rows] == ["tokens", "tokens", "unfinished"]
    assert rows[0]["source"] == f"jsonl {cache.parent / 'a.jsonl'}"
    assert not any(row["in_use"] for row in rows)
    size = sum(file.stat().st_size for file in (cache / rows[1]["path"]).rglob("*"))
    assert rows[1]["bytes"] == size
    assert "b.txt" in call(capsys, "list", *words)[1].out
    assert call(capsys, "prune", *words)[0] == 2
    assert call(capsys, "prune", *words, "--all", "--days", 3)[0] == 2
    code, said = call(capsys, "prune", *words, "--days", 3, "--dry-run", "--json")
    assert [row["path"] for row in json.loads(said.out)["removed"]] == [rows[0]["path"]]
    assert len(list_entries(cache)) == 3
    # Nothing of a day's age has to go for so much room.
    limit = (rows[1]["bytes"] + 1) / 1e9
    assert call(capsys, "prune", *words, "--max-gb", limit)[0] == 0
    assert [str(entry.path) for entry in list_entries(cache)] == [row["path"] for row in rows[1:]]
    assert call(capsys, "prune", *words, "--all")[0] == 0
    assert list_entries(cache) == []
    assert len([*cache.rglob("precious")]) == 3


def test_what_a_process_uses_stays(cache, capsys):
    source = JsonlSource(path=str(cache.parent / "a.jsonl")).for_tokenizer(ByteTokenizer())
    store = open_or_prepare(source, ByteTokenizer(), cache)
    made = cache / f"records-{HASH}"
    script = "import sys; from trainer.engine.corpus.prune import *\n"
    script += "print([delete_entry(entry) for entry in list_entries(Path(sys.argv[1]))])"
    with hold_lock(made.with_name(f"{made.name}.lock"), 0):
        done = subprocess.run(
            [sys.executable, "-c", script, cache], capture_output=True, text=True, check=True
        )
    assert done.stdout.count("a process uses it") == 2
    assert sorted(entry.kind for entry in list_entries(cache)) == ["tokens", "unfinished"]
    assert store.num_documents == 1
    del store
    assert [delete_entry(entry) for entry in list_entries(cache)] == ["", ""]
    assert open_or_prepare(source, ByteTokenizer(), cache).num_documents == 1
