"""Parts that several machines prepare become the bytes of one machine; duplicates are left out."""

import json
import shutil

import numpy as np
import pytest
from datasketch import MinHash

from tests.sources.chats import TALK
from trainer.cli.main import _run
from trainer.engine.corpus.merging.duplicates import DuplicateFilter, parse_dedup
from trainer.engine.corpus.merging.near_duplicates import hash_runs, make_filter
from trainer.engine.corpus.store import TokenStore
from trainer.engine.corpus.tokenise import Tally, make_chunk
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer


def command(*words):
    return _run([str(word) for word in words])


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Files that are a part each, with duplicates between and within them, and faults."""
    monkeypatch.setattr("trainer.engine.sources.documents.PART_BYTES", 2000)
    monkeypatch.setattr("trainer.engine.sources.files.PART_BYTES", 2000)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        texts = [f"document {number}.{place} " * 8 for place in range(12)]
        texts += [texts[3], "the same everywhere " * 5, ""]
        lines = [json.dumps({"text": text}) for text in texts]
        lines.insert(4, "{broken")
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def files_of(folder):
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".compared")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def prepare(corpus, out, *more):
    options = ["--on-error", "skip", "--workers", 1, "--shard-tokens", 65536]
    assert command("data", "prepare", corpus, "--out", out, *options, *more) == 0


@pytest.mark.parametrize("dedup", [[], ["--dedup", "exact"], ["--dedup", "near:0.9"]])
def test_merged_parts_have_the_bytes_of_one_machine(corpus, tmp_path, capsys, dedup):
    prepare(corpus, tmp_path / "whole", *dedup)
    parts = [tmp_path / f"part-{number}" for number in (1, 2, 3)]
    for number, part in enumerate(parts, 1):
        prepare(corpus, part, "--part", f"{number}/3")
        assert TokenStore.open(part, ByteTokenizer()).num_documents
    merging = ["data", "merge", *reversed(parts), "--out", tmp_path / "merged", *dedup]
    assert command(*merging) == 0
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "whole")
    assert not list(tmp_path.glob("*.unfinished"))
    said = json.loads((tmp_path / "whole/tokens.json").read_text())
    assert (said["skipped"], len(said["faults"])) == (5, 5)
    assert said["num_documents"] == (5 * 14 if not dedup else 5 * 12 + 1)
    assert said["duplicates"] == (0 if not dedup else 5 + 4)
    capsys.readouterr()
    assert command(*merging) == 0
    assert "already done" in capsys.readouterr().out
    prepare(corpus, tmp_path / "merged", *dedup)
    assert "already done" in capsys.readouterr().out
    assert command("data", "inspect", tmp_path / "merged") == 0


def test_parts_of_copied_files_fit_together_and_loss_masks_are_kept(tmp_path):
    (tmp_path / "a").mkdir()
    for number in range(2):
        lines = [{"messages": [*TALK]}] * 3 if number else [{"prompt": "a", "completion": "b"}] * 4
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"a/{number}.jsonl").write_text(text)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copy)
    options = ["--source", "chat", "--set", 'template="chatml"', "--workers", 1]
    for number, folder in enumerate("ab", 1):
        parts = ["--out", tmp_path / f"part-{number}", "--part", f"{number}/2", *options]
        # Two sources: a part each, because small files of one source share a part.
        sources = [tmp_path / folder / "0.jsonl", tmp_path / folder / "1.jsonl"]
        assert command("data", "prepare", *sources, *parts) == 0
    places = [tmp_path / "part-1", tmp_path / "part-2"]
    assert command("data", "merge", *places, "--out", tmp_path / "merged") == 0
    sources = [tmp_path / "a/0.jsonl", tmp_path / "a/1.jsonl"]
    assert command("data", "prepare", *sources, "--out", tmp_path / "whole", *options) == 0
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "whole")
    assert 0 < TokenStore.open(tmp_path / "merged", None).loss_mask.mean() < 1


def test_what_does_not_fit_together_is_refused(corpus, tmp_path, capsys):
    def refused(*words, code=2):
        assert command("data", *words) == code
        return capsys.readouterr().err

    prepare(corpus, tmp_path / "1", "--part", "1/2")
    prepare(corpus, tmp_path / "other", "--part", "2/3")
    prepare(corpus, tmp_path / "whole")
    out = ["--out", tmp_path / "out"]
    assert "part 2 of 2 is missing" in refused("merge", tmp_path / "1", *out)
    assert "whole is no part of a corpus" in refused("merge", tmp_path / "whole", *out)
    said = refused("merge", tmp_path / "1", tmp_path / "other", *out)
    assert "are parts of different documents" in said
    shutil.copytree(tmp_path / "1", tmp_path / "again")
    assert "are both part 1" in refused("merge", tmp_path / "1", tmp_path / "again", *out)
    assert not (tmp_path / "out").exists()
    prepare(corpus, tmp_path / "2", "--part", "2/2")
    (tokens,) = (tmp_path / "2").glob("tokens-*.bin")
    content = bytearray(tokens.read_bytes())
    content[5] ^= 1
    tokens.write_bytes(content)
    both = [tmp_path / "1", tmp_path / "2"]
    assert f"{tokens}: its checksum differs" in refused("merge", *both, *out, code=4)
    more = ["prepare", corpus, *out]
    assert "--part 3/2: expected I/N" in refused(*more, "--part", "3/2")
    assert "would be empty" in refused(*more, "--part", "80/90")
    assert "needs all parts" in refused(*more, "--part", "1/2", "--dedup", "exact")
    assert "--dedup fuzzy: expected exact, near" in refused(*more, "--dedup", "fuzzy")
    assert "already, made from other" in refused("prepare", corpus, "--out", tmp_path / "whole")


def test_exact_duplicates_are_counted_and_masks_follow():
    tokenizer = ByteTokenizer()
    documents = [np.frombuffer(text, np.uint8) for text in (b"one", b"two", b"one", b"onee")]
    masks = [np.arange(len(ids) + 1) % 2 == 0 for ids in documents]
    chunk = make_chunk(tokenizer, documents, masks, Tally(duplicates=0, empty=2))
    duplicates = DuplicateFilter()
    found = duplicates.drop(chunk)
    assert found.lengths.tolist() == [4, 4, 5]
    assert found.tokens.tobytes() == chunk.tokens[np.r_[0:8, 12:17]].tobytes()
    assert found.loss_mask.tolist() == chunk.loss_mask[np.r_[0:8, 12:17]].tolist()
    assert (found.tally.duplicates, found.tally.empty) == (1, 2)
    again = duplicates.drop(chunk)
    assert (len(again.tokens), again.tally.duplicates) == (0, 4)


def test_near_duplicates_are_those_whose_runs_are_mostly_equal():
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 256, 400) for _ in range(30)]
    changed = [text.copy() for text in texts]
    for number, text in enumerate(changed):  # each change spoils the runs around it
        text[generator.choice(400, 1 + number, replace=False)] += 1
    shares = [share_of_runs(one, other) for one, other in zip(texts, changed, strict=True)]
    assert max(shares) > 0.95
    assert min(shares) < 0.6
    duplicates = make_filter(parse_dedup("near"))
    assert all(duplicates.is_new(text) for text in texts)
    for text, share in zip(changed, shares, strict=True):
        is_new = duplicates.is_new(text)
        if abs(share - 0.8) > 0.12:
            assert is_new == (share < 0.8), share
    assert not duplicates.is_new(texts[0])
    assert duplicates.is_new(np.array([3]))  # shorter than a run


def share_of_runs(one, other):
    runs = [{tuple(ids[i : i + 5].tolist()) for i in range(len(ids) - 4)} for ids in (one, other)]
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


def test_hashes_of_runs_are_of_sets_that_minhash_compares():
    one, other = np.arange(300), np.r_[np.arange(200), np.arange(500, 600)]
    assert len(hash_runs(one)) == 296
    estimates = []
    for ids in (one, other):
        sketch = MinHash(512, hashfunc=int)
        sketch.update_batch(hash_runs(ids).tolist())
        estimates.append(sketch)
    assert estimates[0].jaccard(estimates[1]) == pytest.approx(share_of_runs(one, other), abs=0.08)
