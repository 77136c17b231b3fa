"""Conversations as a source: its recipe table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from ..core.config import RecipePath
from .configs import DocumentSource, FileSource, sources
from .documents import Document

if TYPE_CHECKING:
    from ..tokenizers.tokenizer import Tokenizer
    from .chat import ChatTemplate


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
        from .chat import find_template

        source = self.model_copy()
        source._template = find_template(
            tokenizer, self.template, self.template_file, self.variables, self.date
        )
        return source

    def parts(self) -> Sequence[Any]:
        """Return runs of files in the order of their names, and whole lines of large ones."""
        from .files import line_parts

        return line_parts(self.path, self.suffix)

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one conversation a line."""
        from .chat import read_chats

        return read_chats(part, self, self._resolved())

    def settings(self) -> str:
        """Return the keys, what is learned, and the template."""
        keys = (self.field, self.role_key, self.content_key, self.learn)
        return f" {keys} {self._resolved().fingerprint}"

    def _resolved(self) -> ChatTemplate:
        if self._template is None:
            raise RuntimeError("for_tokenizer comes first: it finds the chat template")
        return self._template
