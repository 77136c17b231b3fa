"""Training a tokenizer, against the libraries that load it."""

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.limits import limited
from trainer.cli.train_tokenizer import document_sources
from trainer.engine.core.errors import DataError, EnvironmentFault, RecipeError
from trainer.engine.corpus import train_tokenizer as train_tokenizer_module
from trainer.engine.corpus.train_tokenizer import run_interruptibly, train_tokenizer
from trainer.engine.sources.configs import JsonlSource, TextSource
from trainer.engine.sources.python_library import PythonSource
from trainer.engine.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from trainer.engine.tokenizers.patterns import PATTERNS

SOURCE = PythonSource(max_bytes=300_000)
TEXTS = [
    "def f(self):\n    return 12345",
    "naïve 東京 🎉",
    "<|endoftext|> inside",
    "  \t\r\n x",
    "",
]
NAMES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "tokenizer"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer, read = train_tokenizer([SOURCE], out, vocab_size=600, special_tokens=special)
    texts = [text for text in SOURCE.documents() if text]
    assert (read.documents, read.bytes) == (len(texts), sum(len(text.encode()) for text in texts))
    assert tokenizer.vocab_size == 600
    return out


def test_transformers_loads_it_and_gives_the_same_ids(trained: Path) -> None:
    ours, auto = HuggingFaceTokenizer(trained), AutoTokenizer.from_pretrained(trained)
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert auto(text)["input_ids"] == ids
        assert auto.decode(ids) == text
    assert (auto.eos_token_id, ours.eos_id, len(auto)) == (0, 0, 600)
    assert ours.encode("<|im_start|>").tolist() == [1]
    assert {file.name for file in trained.iterdir()} == NAMES


def test_no_token_reaches_over_a_piece(trained: Path) -> None:
    native = Tokenizer.from_file(str(trained / "tokenizer.json"))
    for name in native.get_vocab():
        if not name.startswith("<|"):
            assert len(native.pre_tokenizer.pre_tokenize_str(native.decoder.decode([name]))) <= 2
    assert max(len(native.decode([token])) for token in native.encode("1234567890" * 9).ids) <= 3


def test_it_is_the_same_twice_and_on_one_core(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    train_tokenizer([SOURCE], tmp_path / "again", vocab_size=600, special_tokens=special)
    for name in NAMES:
        assert (tmp_path / "again" / name).read_bytes() == (trained / name).read_bytes()


def test_more_tokens_spell_the_same_text_with_fewer(trained: Path, tmp_path: Path) -> None:
    larger, _ = train_tokenizer([SOURCE], tmp_path / "larger", vocab_size=1200)
    text = Path(json.__file__).read_text()
    smaller = HuggingFaceTokenizer(trained)
    assert len(larger.encode(text)) < 0.9 * len(smaller.encode(text)) < 0.9 * 0.7 * len(text)


@pytest.mark.parametrize("name", PATTERNS)
def test_each_pattern_keeps_every_byte(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words, 123 numbers and more words\n" * 5)
    source = TextSource(path=str(tmp_path / "a.txt"))
    tokenizer, _ = train_tokenizer([source], tmp_path / "out", vocab_size=300, pattern=name)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|endoftext|>", "")


def test_max_bytes_ends_the_reading(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "aaaa"}\n' * 10)
    source = JsonlSource(path=str(tmp_path / "a.jsonl"))
    _, read = train_tokenizer([source], tmp_path / "out", vocab_size=300, max_bytes=15)
    assert (read.documents, read.bytes) == (3, 12)


def test_a_damaged_line_stops_it_or_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*a number"):
        train_tokenizer([JsonlSource(path=str(file))], tmp_path / "out", vocab_size=300)
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]
    skipping = JsonlSource(path=str(file), on_error="skip")
    _, read = train_tokenizer([skipping], tmp_path / "out", vocab_size=300)
    assert (read.documents, read.skipped) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 257, "special_tokens": ["a", "b"]}, "no room"),
        ({"special_tokens": ["a", "a"]}, "given twice"),
        ({"special_tokens": ["<|end|>", "a"]}, "'a': expected more than one character"),
        ({"special_tokens": ["<|\udcff|>"]}, "printable"),
        ({"special_tokens": []}, "needs special tokens"),
        ({"pattern": "lama3"}, "no pattern is named 'lama3'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        train_tokenizer([SOURCE], tmp_path / "out", **{"vocab_size": 300, **options})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(RecipeError, match="is there already"):
        train_tokenizer([SOURCE], tmp_path, vocab_size=300)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    source = TextSource(path=str(tmp_path / "file"))
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        train_tokenizer([source], tmp_path / "file" / "out", vocab_size=300)


def test_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    source = TextSource(path=str(tmp_path / "empty.txt"))
    with pytest.raises(DataError, match="hold no text"):
        train_tokenizer([source], tmp_path / "out", vocab_size=300)


def test_paths_are_read_by_how_their_names_end(tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text("{}")
    (tmp_path / "r.toml").write_text(
        '[run]\nsteps = 1\n[[data.sources]]\nname = "text"\npath = "a.txt"\n'
    )
    paths = [str(tmp_path / name) for name in ("lines", "r.toml", "a.md", "b.jsonl")]
    lines, recipe, text, jsonl = document_sources(paths, "body")
    assert (type(lines), lines.path) == (JsonlSource, paths[0])
    assert (type(recipe), recipe.path) == (TextSource, str(tmp_path / "a.txt"))
    assert (type(text), text.path) == (TextSource, paths[2])
    assert (type(jsonl), jsonl.field) == (JsonlSource, "body")
    (tmp_path / "none.toml").write_text('[run]\nsteps = 1\n[[data.sources]]\nname = "synthetic"\n')
    with pytest.raises(RecipeError, match="no source in it holds documents"):
        document_sources([str(tmp_path / "none.toml")], "text")


@pytest.mark.parametrize("unit", ["a", " ", "=", "\n ", "ab", "\x1c", "é"])
def test_one_letter_without_end_takes_little_time(tmp_path: Path, unit: str) -> None:
    (tmp_path / "a.txt").write_text(unit * 2**19 + "!")
    with limited(cpu_seconds=15):
        train_tokenizer([TextSource(path=str(tmp_path / "a.txt"))], tmp_path / "t", vocab_size=300)


@pytest.mark.parametrize("pattern", ["gpt2", "llama3", "qwen2", "o200k"])
def test_the_longest_piece_changes_nothing_for_shorter_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.setattr(train_tokenizer_module, "LONGEST_PIECE", 50_000)
    train_tokenizer([SOURCE], tmp_path / "far", vocab_size=500, pattern=pattern)
    monkeypatch.undo()
    train_tokenizer([SOURCE], tmp_path / "usual", vocab_size=500, pattern=pattern)
    contents = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("far", "usual")]
    assert contents[0] == contents[1]
    split = json.loads(contents[0])["pre_tokenizer"]["pretokenizers"][0]
    assert split["pattern"] == {"Regex": PATTERNS[pattern]}


def test_an_interrupt_is_heard_while_the_library_is_deaf() -> None:
    release, items = threading.Event(), iter(range(100))

    def read(numbers: Iterator[int]) -> None:
        next(numbers)
        signal.raise_signal(signal.SIGINT)  # Python's handlers run in the main thread
        release.wait(60)

    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(items, read)
    release.set()
    assert next(items) == 1


def test_what_goes_wrong_while_the_library_reads_is_raised() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        run_interruptibly(numbers(), list)
