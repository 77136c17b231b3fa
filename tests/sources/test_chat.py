"""Rendered conversations, against transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.sources.chats import (
    CALL,
    DATED,
    FORGETFUL,
    MISTRAL,
    QWEN,
    SYSTEM,
    TALK,
    TOOLS,
    make_tokenizer,
    template,
)  # fmt: skip
from trainer.engine.core.errors import DataError, RecipeError
from trainer.engine.sources.chat_renderer import (
    CHATML,
    LLAMA3,
    TEMPLATES,
    ChatRenderer,
    find_template,
    open_renderer,
)
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.hf_tokenizer import HuggingFaceTokenizer

CASES = {
    "chatml": (CHATML, [TALK, SYSTEM]),
    "llama3": (LLAMA3, [TALK, SYSTEM]),
    "qwen": (QWEN, [TALK, SYSTEM]),
    "mistral": (MISTRAL, [TALK]),
    "dated": (DATED, [TALK, SYSTEM, CALL]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer")


@pytest.fixture(scope="module")
def ours(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, bos_token="<s>")


@pytest.fixture(autouse=True)
def fixed_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes today's date; ours is the recipe's."""
    from datetime import datetime

    from transformers.utils import chat_template_utils

    class Day(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2024, 7, 26)

    monkeypatch.setattr(chat_template_utils, "datetime", Day)


@pytest.fixture
def renderer(request: pytest.FixtureRequest) -> Iterator[ChatRenderer]:
    with open_renderer(template(request.param)) as running:
        yield running


def learned_text(marked: Any) -> list[str]:
    return [marked.text[start:stop] for start, stop in marked.loss_ranges]


@pytest.mark.parametrize("name", CASES)
def test_texts_and_ids_are_those_of_transformers(name: str, ours: Any, theirs: Any) -> None:
    text, conversations = CASES[name]
    theirs.chat_template = text
    with open_renderer(template(text)) as renderer:
        for messages in conversations:
            tools = TOOLS if messages is CALL else None
            expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
            marked = renderer.render(messages, tools)
            assert marked.text == expected.removesuffix("</s>")
            ((ids, _),) = ours.encode_masked([marked])
            eos = [ours.eos_id] * expected.endswith("</s>")
            found = theirs.apply_chat_template(messages, tools=tools, return_dict=True)
            assert [*ids.tolist(), *eos] == found["input_ids"]
            prompt = theirs.apply_chat_template(
                messages[:1], tokenize=False, add_generation_prompt=True
            )
            assert renderer.render_prompt(messages[:1]) == prompt


@pytest.mark.parametrize(
    ("name", "end"), [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("mistral", "</s>")]
)
def test_what_ends_an_answer_is_known(name: str, end: str) -> None:
    with open_renderer(template(CASES[name][0])) as renderer:
        assert renderer.find_end_of_answer() == end


@pytest.mark.parametrize("name", ["chatml", "llama3", "dated"])
def test_generation_blocks_mark_what_transformers_marks(name: str, ours: Any, theirs: Any) -> None:
    text, conversations = CASES[name]
    theirs.chat_template = text
    with open_renderer(template(text)) as renderer:
        for messages in conversations:
            ((_, learned),) = ours.encode_masked([renderer.render(messages)])
            found = theirs.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
            assert any(learned)
            assert learned.astype(int).tolist() == found["assistant_masks"]


@pytest.mark.parametrize("renderer", [QWEN], indirect=True)
def test_without_such_blocks_answers_and_their_ends_are_learned(renderer: ChatRenderer) -> None:
    expected = [" It is 4. 東京 🎉 <|im_end|>\n", "Ünd 6.<|im_end|>\n"]
    assert learned_text(renderer.render(TALK)) == expected
    assert learned_text(renderer.render(SYSTEM)) == expected
    everything = renderer.render(TALK, learn="all")
    assert learned_text(everything) == [everything.text]


@pytest.mark.parametrize("renderer", [MISTRAL], indirect=True)
def test_the_token_that_ends_the_document_is_left_to_the_store(renderer: ChatRenderer) -> None:
    marked = renderer.render(TALK)
    assert learned_text(marked) == [" It is 4. 東京 🎉 </s>", "Ünd 6."]
    assert marked.loss_ranges[-1][1] == len(marked.text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_our_templates_learn_answers_and_their_ends(name: str) -> None:
    with open_renderer(find_template(ByteTokenizer(), name)) as renderer:
        first, last = learned_text(renderer.render(SYSTEM))
    end = {"chatml": "<|im_end|>\n", "llama3": "<|eot_id|>"}[name]
    assert (first.strip(" "), last) == (
        f"It is 4. 東京 🎉{' ' * (name == 'chatml')}{end}",
        f"Ünd 6.{end}",
    )


@pytest.mark.parametrize("renderer", [FORGETFUL], indirect=True)
def test_a_template_that_rewrites_earlier_turns_is_explained(renderer: ChatRenderer) -> None:
    assert learned_text(renderer.render(TALK[:2])) == ["assistant:  It is 4. 東京 🎉 "]
    with pytest.raises(ValueError, match=r"messages\[1\].*generation"):
        renderer.render(TALK)


@pytest.mark.parametrize("renderer", [MISTRAL], indirect=True)
def test_what_the_template_refuses_is_told(renderer: ChatRenderer) -> None:
    with pytest.raises(ValueError, match="roles must alternate"):
        renderer.render(SYSTEM)
    assert renderer.render(TALK).text.startswith("<s>[INST]")


def test_generation_blocks_in_a_macro_are_refused() -> None:
    text = "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    text += "{% for m in messages %}{{ m.role + ': ' + say(m) }}{% endfor %}"
    with (
        open_renderer(template(text)) as renderer,
        pytest.raises(ValueError, match="inside a macro or filter"),
    ):
        renderer.render(TALK)


def test_reasoning_has_all_its_names(theirs: Any) -> None:
    text = "{% for m in messages %}{{ m.thinking ~ m.reasoning_content ~ m.content }}{% endfor %}"
    talk = [TALK[0], {**TALK[1], "reasoning": "hm"}]
    theirs.chat_template = text
    with open_renderer(template(text)) as renderer:
        found = renderer.render(talk, learn="all").text
    assert found == theirs.apply_chat_template(talk, tokenize=False)
    assert "hmhm" in found


def test_variables_reach_the_template_and_the_fingerprint(ours: HuggingFaceTokenizer) -> None:
    one = find_template(ours, "chatml", variables={"thinking": False})
    assert one.variables == {"eos_token": "</s>", "thinking": False}
    others = [
        find_template(ours, "chatml"),
        find_template(ours, "llama3", variables={"thinking": False}),
        find_template(ours, "chatml", variables={"thinking": False}, date="2024-07-27"),
    ]
    assert len({one.fingerprint, *(each.fingerprint for each in others)}) == 4
    assert (
        find_template(ours, "chatml", variables={"thinking": False}).fingerprint == one.fingerprint
    )


def test_the_template_comes_from_the_tokenizer_or_a_file(
    ours: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="brings no chat template") as error:
        find_template(ours)
    assert '"chatml"' in error.value.render()
    (tmp_path / "mine.jinja").write_text("\ufeffmine", encoding="utf-8")
    assert find_template(ours, file=str(tmp_path / "mine.jinja")).template == "mine"
    with pytest.raises(DataError, match="No such file"):
        find_template(ours, file=str(tmp_path / "absent.jinja"))
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        find_template(ours, file=str(tmp_path / "mine.jinja"))
    (tmp_path / "mine.jinja").write_text("x" * (2**20 + 1))
    with pytest.raises(DataError, match="larger than 1 MiB"):
        find_template(ours, file=str(tmp_path / "mine.jinja"))
