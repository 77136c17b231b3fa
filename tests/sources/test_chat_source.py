"""Conversations as a source: what is refused and where, and what reaches the loss."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sources.chats import MISTRAL, SYSTEM, TALK, TOOLS, chats, make_tokenizer
from trainer.engine.core.errors import DataError
from trainer.engine.corpus.prepare import open_source
from trainer.engine.data.batch import IGNORED
from trainer.engine.data.dataset import open_data
from trainer.engine.data.tables import Data
from trainer.engine.sources.documents import DocumentFault
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from trainer.engine.tokenizers.tokenizer import MaskedDocument


def user(text: Any = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: Any = "ho") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def documents(path: Path, **settings: Any) -> list[Any]:
    return list(chats(path, **settings).for_tokenizer(ByteTokenizer()).documents())


def test_each_line_is_a_document_and_its_answers_are_learned(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": [user(), answer()]})
    first, second = documents(file)
    assert [first.text[start:stop] for start, stop in first.loss_ranges] == [
        " It is 4. 東京 🎉 <|im_end|>\n",
        "Ünd 6.<|im_end|>\n",
    ]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    assert second == MaskedDocument(text, ((text.index("ho"), len(text)),))
    everything = documents(file, learn="all")[1]
    assert everything == MaskedDocument(text, ((0, len(text)),))


def test_sharegpt_names_are_read_by_setting_the_keys(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    file = write(tmp_path / "a.jsonl", {"conversations": talk})
    keys = {"field": "conversations", "role_key": "from", "content_key": "value"}
    plain = write(tmp_path / "b.jsonl", {"messages": [user(), answer()]})
    assert documents(file, **keys) == documents(plain)


def test_tools_and_other_keys_reach_the_template(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ tools[0].function.name }}{% for m in messages %}{{ m.mood }}{% endfor %}")
    line = {"messages": [{**user(), "mood": "!"}, answer()], "tools": TOOLS}
    data = write(tmp_path / "a.jsonl", line)
    (document,) = documents(data, template="tokenizer", template_file=str(file), learn="all")
    assert document.text == "add!"


def test_two_templates_are_refused() -> None:
    with pytest.raises(ValueError, match="give either template or template_file"):
        chats(Path("a.jsonl"), template_file="t.jinja")


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
TOOL = {"role": "tool", "content": "1"}
DAMAGED = {
    "not JSON": ("{", "not JSON"),
    "not an object": ([1], "expected a JSON object, found an array"),
    "no messages": ({"text": "x", "id": 3}, 'no field "messages"; the line has: id, text'),
    "no list": ({"messages": "hi"}, '"messages" is a string, expected an array'),
    "empty": ({"messages": []}, "nothing to learn from"),
    "no object": ({"messages": [user(), 3]}, r"messages[1]: expected an object, found a number"),
    "no role": ({"messages": [{"content": "x"}]}, 'messages[0]: no "role"; it has: content'),
    "no content": ({"messages": [user(), {"role": "assistant"}]}, 'messages[1]: no "content"'),
    "null": ({"messages": [user(None), answer()]}, '[0]: "content" is null, expected a string'),
    "parts": ({"messages": [user([{"text": "x"}]), answer()]}, '"content" is an array'),
    "role": ({"messages": [{"role": 1, "content": ""}]}, "the role is a number"),
    "misspelt": ({"messages": [{"role": "asistant", "content": ""}]}, 'mean "assistant"?'),
    "unknown": ({"messages": [{"role": "zzz", "content": ""}]}, "known: system, developer"),
    "answer first": ({"messages": [answer(), user()]}, "role 'assistant' at the beginning"),
    "twice user": ({"messages": [user(), user(), answer()]}, "[1]: role 'user' after 'user'"),
    "twice answer": ({"messages": [user(), answer(), answer()]}, "after 'assistant'"),
    "late system": ({"messages": [user(), SYSTEM[0]]}, "role 'system' after 'user'"),
    "tool": ({"messages": [user(), TOOL, answer()]}, "role 'tool' after 'user'"),
    "no answer": ({"messages": [SYSTEM[0], user()]}, "no message is the assistant's"),
    "surrogate": ({"messages": [user("\ud800"), answer()]}, "half of a surrogate pair"),
    "no string": ({"messages": [user(), CALL, TOOL, answer()]}, "the template stopped"),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What is read of a good line and all damaged ones."""
    lines = [json.dumps({"messages": TALK})]
    lines += [line if isinstance(line, str) else json.dumps(line) for line, _ in DAMAGED.values()]
    file = tmp_path_factory.mktemp("damaged") / "a.jsonl"
    file.write_text("\n".join([*lines, lines[0]]))
    return documents(file)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_named(name: str, found: list[Any]) -> None:
    number = list(DAMAGED).index(name)
    fault = found[number + 1]
    assert isinstance(fault, DocumentFault)
    assert fault.place.endswith(f"a.jsonl:{number + 2}")
    assert DAMAGED[name][1] in fault.reason
    assert isinstance(found[0], MaskedDocument)
    assert found[-1] == found[0]


def test_only_answers_have_labels(tmp_path: Path) -> None:
    talks = [[user(f"{n} and 1?"), answer(f"it is {n + 1}.")] for n in range(6)]
    file = write(tmp_path / "a.jsonl", *({"messages": talk} for talk in talks))
    table = Data(
        seq_len=256, sources=[chats(file)], packing="documents", validation_fraction=0.0,
        cache_dir=str(tmp_path / "cache"), shuffle=False,
    )  # fmt: skip
    data = open_data(table, ByteTokenizer(), seed=0)
    count = data.train.rows_per_epoch
    batch = data.train.batch(0, count)
    labels = batch.labels[batch.labels != IGNORED].tolist()
    expected: list[int] = []
    for number in range(6):
        expected += [*f"it is {number + 1}.<|im_end|>\n".encode(), 256]
    assert sorted(labels) == sorted(expected)
    text = ByteTokenizer().decode(labels)
    assert all(f"it is {number + 1}.<|im_end|>\n" in text for number in range(6))


def test_a_document_that_its_template_ends_has_one_end(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(MISTRAL)
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    tokenizer = HuggingFaceTokenizer(folder)
    file = write(tmp_path / "a.jsonl", {"messages": [user(), answer()]})
    source = chats(file, template="tokenizer")
    store = open_source(source, tokenizer, tmp_path / "cache")
    text = "<s>[INST] hi [/INST]ho</s>"
    assert store.tokens.tolist() == tokenizer.encode(text).tolist()
    assert store.loss_mask is not None
    learned = np.asarray(store.tokens)[np.asarray(store.loss_mask)]
    assert tokenizer.decode(learned[:-1]) == "ho"
    assert learned[-1] == tokenizer.eos_id


def test_the_fingerprint_follows_the_template_and_what_is_learned(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": TALK})
    ways: list[dict[str, Any]] = [
        {}, {"template": "llama3"}, {"learn": "all"}, {"variables": {"a": 1}}, {"field": "x"},
        {"date": "2025-01-01"},
    ]  # fmt: skip
    sources = [chats(file, **way).for_tokenizer(ByteTokenizer()) for way in ways]
    prints = {source.fingerprint() for source in sources}
    assert len(prints) == len(ways)
    again = pickle.loads(pickle.dumps(sources[0]))
    assert again.fingerprint() in prints
    assert list(again.documents()) == documents(file)


def test_a_damaged_line_stops_the_preparation_or_is_skipped(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": [user()]})
    with pytest.raises(DataError, match=r"a\.jsonl:2: no message is the assistant's"):
        open_source(chats(file), ByteTokenizer(), tmp_path / "cache")
    store = open_source(chats(file, on_error="skip"), ByteTokenizer(), tmp_path / "cache")
    assert (store.num_documents, store.skipped) == (1, 1)


def test_pairs_and_alpaca_are_the_same_conversations_as_messages(tmp_path: Path) -> None:
    talk = [user("Add 1.\n\n2"), answer("3")]
    rules = {"role": "system", "content": "Be brief."}
    expected = documents(
        write(tmp_path / "a.jsonl", *[{"messages": talk}] * 3, {"messages": [rules, *talk]}),
        template="chatml",
    )
    alpaca = {"instruction": "Add 1.", "input": "2", "output": "3"}
    given = [
        {"prompt": "Add 1.\n\n2", "completion": "3"},
        {"prompt": [user("Add 1.\n\n2")], "completion": [answer("3")]},
        alpaca,
        {**alpaca, "system": "Be brief."},
    ]
    assert documents(write(tmp_path / "b.jsonl", *given), template="chatml") == expected


def test_alpaca_without_text_is_a_fault(tmp_path: Path) -> None:
    lines = [{"instruction": 3, "output": "a"}, {"prompt": "x", "completion": None}]
    found = documents(write(tmp_path / "a.jsonl", *lines), template="chatml")
    assert '"instruction" is a number, expected a string' in str(found[0])
    assert '"content" is null, expected a string' in str(found[1])
