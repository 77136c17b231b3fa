"""The source of conversations: its recipe table, and the checks of its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from ..core.config import RecipePath
from ..core.errors import nearest
from ..tokenizers.tokenizer import MarkedText, Tokenizer
from .chat_renderer import ChatTemplate, find_template, rendering
from .configs import DocumentSource, FileSource, sources
from .documents import Document, Part
from .files import json_kind, line_parts, read_objects


@sources.register
class ChatSource(FileSource):
    """Conversations for finetuning: JSON lines of messages, laid out by a chat template."""

    name: Literal["chat"] = "chat"
    field: str = "messages"
    """the key that holds the list of messages; "conversations" in ShareGPT's format"""
    role_key: str = "role"
    """the key of a message that says whose it is; "from" in ShareGPT's format"""
    content_key: str = "content"
    """the key of a message that holds its text; "value" in ShareGPT's format"""
    template: Literal["tokenizer", "chatml", "llama3"] = "tokenizer"
    """Jinja chat template: "tokenizer" takes the one in the tokenizer's files"""
    template_file: RecipePath = ""
    """a file with another chat template; relative to the recipe"""
    variables: dict[str, str | bool | int | float] = {}
    """what the template finds beside messages and special tokens, such as { thinking = false }"""
    date: Annotated[str, Field(pattern=r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$")] = (
        "2024-07-26"
    )
    """the date that `strftime_now` gives the template: today's would change the data every day"""
    learn: Literal["assistant", "all"] = "assistant"
    """the loss counts "assistant": its turns and their ends; "all": every token"""
    suffix: ClassVar[str] = ".jsonl"
    _template: ChatTemplate | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _has_one_template(self) -> Self:
        if self.template_file and self.template != "tokenizer":
            raise ValueError("give either template or template_file")
        return self

    def for_tokenizer(self, tokenizer: Tokenizer) -> DocumentSource:
        """Return the source with the template that it means for this tokenizer."""
        source = self.model_copy()
        source._template = find_template(
            tokenizer, self.template, self.template_file, self.variables, self.date
        )
        return source

    def parts(self) -> Sequence[Any]:
        """Return runs of files in the order of their names, and whole lines of large ones."""
        return line_parts(self.path, self.suffix)

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one conversation a line."""

        return read_chats(part, self, self._resolved())

    def settings(self) -> str:
        """Return the keys, what is learned, and the template."""
        keys = (self.field, self.role_key, self.content_key, self.learn)
        return f" {keys} {self._resolved().fingerprint}"

    def _resolved(self) -> ChatTemplate:
        if self._template is None:
            raise RuntimeError("for_tokenizer comes first: it finds the chat template")
        return self._template


OTHER_NAMES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}
FOLLOWS = {
    "system": {"", "system", "developer"},
    "developer": {"", "system", "developer"},
    "user": {"", "system", "developer", "assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}
"""by role: after which roles it may come; "" is the beginning"""


def conversation(line: Mapping[str, Any], source: ChatSource) -> list[dict[str, Any]]:
    """Return the messages of a line, with `role` and `content`, checked.

    Raises:
        ValueError: what is wrong with them.
    """
    if source.field not in line:
        known = ", ".join(sorted(line)[:10])
        raise ValueError(f'no field "{source.field}"; the line has: {known}'[:300])
    listed = line[source.field]
    if not isinstance(listed, list):
        raise ValueError(f'"{source.field}" is {json_kind(listed)}, expected an array')
    messages: list[dict[str, Any]] = []
    for index, each in enumerate(listed):
        try:
            messages.append(_message(each, source, messages[-1]["role"] if messages else ""))
        except ValueError as error:
            raise ValueError(f"{source.field}[{index}]: {error}"[:300]) from error
    if source.learn == "assistant" and all(each["role"] != "assistant" for each in messages):
        raise ValueError("no message is the assistant's: there is nothing to learn from")
    return messages


def _message(value: Any, source: ChatSource, before: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {json_kind(value)}")
    for key in (source.role_key, source.content_key):
        if key not in value and not (key == source.content_key and value.get("tool_calls")):
            raise ValueError(f'no "{key}"; it has: {", ".join(sorted(value)[:10])}')
    role = _role(value[source.role_key])
    content = value.get(source.content_key)
    if not isinstance(content, str) and not (content is None and value.get("tool_calls")):
        raise ValueError(f'"{source.content_key}" is {json_kind(content)}, expected a string')
    if before not in FOLLOWS[role]:
        place = f"after {before!r}" if before else "at the beginning"
        expected = ", ".join(sorted(name or "the beginning" for name in FOLLOWS[role]))
        raise ValueError(f"role {role!r} {place}; it may come after: {expected}")
    renamed = {source.role_key, source.content_key}
    others = {key: each for key, each in value.items() if key not in renamed}
    return {**others, "role": role, "content": content}


def _role(role: Any) -> str:
    if not isinstance(role, str):
        raise ValueError(f"the role is {json_kind(role)}, expected a string")
    known = OTHER_NAMES.get(role, role)
    if known not in FOLLOWS:
        hint = nearest(role, [*FOLLOWS, *OTHER_NAMES]) or f"known: {', '.join(FOLLOWS)}"
        raise ValueError(f"unknown role {role!r}; {hint}")
    return known


def read_chats(part: Part, source: ChatSource, template: ChatTemplate) -> Iterator[Document]:
    """Yield a document a line of JSON."""
    with rendering(template) as renderer:

        def document(line: dict[str, Any]) -> MarkedText:
            messages = conversation(line, source)
            return renderer.document(messages, line.get("tools"), source.learn)

        yield from read_objects(part, document)
