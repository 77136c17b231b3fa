"""The source of conversations: its recipe table, and the checks of its messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from ..core.config import RecipePath
from ..core.errors import nearest
from ..tokenizers.tokenizer import MaskedDocument, Tokenizer
from .chat_renderer import ChatTemplate, find_template, open_renderer
from .chat_rows import iterate_rows, select_columns
from .configs import DocumentSource, FileSource, RecordSource, sources
from .documents import Document, DocumentFault, Record
from .files import (
    infer_source,
    json_kind,
    read_line_records,
    read_objects,
    require_field,
    require_text,
    split_line_files,
)
from .hub import HFSource
from .parquet import ParquetSource

OTHER_NAMES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}
FOLLOWS = {
    "system": {"", "system", "developer"},
    "developer": {"", "system", "developer"},
    "user": {"", "system", "developer", "assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}
"""for each role, the roles after which it may come; "" is the beginning"""


@sources.register
class ChatSource(RecordSource, FileSource):
    """Conversations for finetuning, laid out by a chat template: JSON lines, Parquet, datasets."""

    name: Literal["chat"] = "chat"
    path: RecipePath = ""
    """JSON lines or Parquet: a file, a folder or a glob; or a folder that `datasets` saved;
    relative to the recipe"""
    repo: str = ""
    """a dataset on the hub, such as "HuggingFaceH4/no_robots"; instead of `path`"""
    config: str | None = None
    """the configuration (subset) of a dataset"""
    split_name: str = "train"
    """which of the dataset's splits; what it is used for says `split`"""
    revision: str | None = None
    """a commit, tag or branch of the hub's dataset; default: the newest commit"""
    field: str = "messages"
    """the key or column that holds the list of messages; "conversations" in ShareGPT's format; in
    its place there may be prompt and completion, or Alpaca's instruction, input and output"""
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
        if bool(self.path) == bool(self.repo):
            raise ValueError("give either path (local files) or repo (a dataset on the hub)")
        if self.template_file and self.template != "tokenizer":
            raise ValueError("give either template or template_file")
        return self

    def for_tokenizer(self, tokenizer: Tokenizer) -> DocumentSource:
        """Return the source with the chat template for this tokenizer."""
        source = self.model_copy()
        source._template = find_template(
            tokenizer, self.template, self.template_file, self.variables, self.date
        )
        return source

    def parts(self) -> Sequence[Any]:
        """Return runs of files in the order of their names, and pieces of large ones."""
        rows = self._find_rows()
        return rows.parts() if rows else split_line_files(self.path, self.suffix)

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one conversation a line or row."""
        rows = self._find_rows()
        with open_renderer(self._resolved()) as renderer:

            def render(line: dict[str, Any]) -> MaskedDocument:
                return renderer.render(self.parse_messages(line), line.get("tools"), self.learn)

            if rows is None:
                yield from read_objects(part, render)
                return
            for row in iterate_rows(rows, part):
                try:
                    yield render(row.values) if isinstance(row, Record) else row
                except ValueError as error:
                    assert isinstance(row, Record), "a fault is not rendered"
                    yield row.make_fault(str(error))

    def read_records(self, part: Any) -> Iterator[Record | DocumentFault]:
        """Yield one record a line or row."""
        rows = self._find_rows()
        return iterate_rows(rows, part) if rows else read_line_records(part, self._columns)

    def select_columns(self, known: Collection[str]) -> dict[str, str]:
        """Return the column of each field that is read, in a table that has these columns.

        Raises:
            ValueError: there is no conversation.
        """
        return self._columns or select_columns(self.field, known)

    def fingerprint(self) -> str:
        """Return what identifies the files or the dataset, and the settings."""
        rows = self._find_rows()
        return rows.fingerprint() + self.settings() if rows else super().fingerprint()

    def content_fingerprint(self) -> str:
        """Return the same, equal on all machines."""
        rows = self._find_rows()
        if rows is None:
            return super().content_fingerprint()
        return rows.content_fingerprint() + self.settings()

    def template_settings(self) -> dict[str, Any]:
        """Return the arguments of `find_template`."""
        keys = {"file": self.template_file, "variables": self.variables, "date": self.date}
        return {"name": self.template, **keys}

    def message_keys(self) -> tuple[str, str]:
        """Return the keys of a message that hold its role and its text."""
        return self.role_key, self.content_key

    def settings(self) -> str:
        """Return the keys, which tokens count in the loss, and the template."""
        keys = (self.describe_columns(), self.role_key, self.content_key, self.learn)
        return f" {keys} {self._resolved().fingerprint}"

    def parse_messages(self, line: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of a line, with `role` and `content`, checked.

        Raises:
            ValueError: what is wrong with them.
        """
        values = pair_messages(line, *self.message_keys()) if self.field not in line else None
        if values is None:
            values = require_field(line, self.field)
        messages = parse_messages(values, self.field, *self.message_keys())
        roles = {message["role"] for message in messages}
        if self.learn == "assistant" and "assistant" not in roles:
            raise ValueError("no message is the assistant's: there is nothing to learn from")
        return messages

    def _find_rows(self) -> RecordSource | None:
        """Return the source that reads rows of tables; None: the files hold JSON lines."""
        rows: RecordSource
        kind = "hf" if self.repo else infer_source(self.path)
        if kind == "hf":
            keys = self.model_dump(include={"path", "repo", "config", "split_name", "revision"})
            rows = HFSource(**keys, streaming=self.streaming)
        elif kind == "parquet":
            rows = ParquetSource(path=self.path, streaming=self.streaming)
        else:
            return None
        return rows.select_known(self.select_columns)

    def _resolved(self) -> ChatTemplate:
        if self._template is None:
            raise RuntimeError("call for_tokenizer first: it finds the chat template")
        return self._template


def pair_messages(
    line: Mapping[str, Any], role_key: str, content_key: str
) -> list[dict[str, Any]] | None:
    """Return the messages of a prompt with its completion, or of Alpaca's fields; None: neither.

    Args:
        line: "prompt" and "completion", texts or lists of messages; or "instruction" and "output",
            and perhaps "input" and "system", as in https://github.com/tatsu-lab/stanford_alpaca.
        role_key: the key of a message that says whose it is.
        content_key: the key of a message that holds its text.

    Raises:
        ValueError: Alpaca's instruction or input is no text.
    """
    if "prompt" in line and "completion" in line:
        parts = [("user", line["prompt"]), ("assistant", line["completion"])]
    elif "instruction" in line and "output" in line:
        asked = require_text(line, "instruction")
        asked += f"\n\n{require_text(line, 'input')}" if line.get("input") else ""
        parts = [("user", asked), ("assistant", line["output"])]
        parts = [("system", line.get("system"))] * bool(line.get("system")) + parts
    else:
        return None
    messages: list[dict[str, Any]] = []
    for role, value in parts:
        messages += value if isinstance(value, list) else [{role_key: role, content_key: value}]
    return messages


def parse_messages(
    values: Any, field: str, role_key: str = "role", content_key: str = "content", before: str = ""
) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`, checked.

    Args:
        values: the messages of a record.
        field: the name of the field that holds them, for messages.
        role_key: the key of a message that says whose it is.
        content_key: the key of a message that holds its text.
        before: the role of the message before the first; "" is the beginning.

    Raises:
        ValueError: what is wrong with them.
    """
    if not isinstance(values, list):
        raise ValueError(f'"{field}" is {json_kind(values)}, expected an array')
    messages: list[dict[str, Any]] = []
    for index, value in enumerate(values):
        try:
            messages.append(_parse_message(value, before, role_key, content_key))
        except ValueError as error:
            raise ValueError(f"{field}[{index}]: {error}"[:300]) from error
        before = messages[-1]["role"]
    return messages


def _parse_message(value: Any, before: str, role_key: str, content_key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {json_kind(value)}")
    calls_tools = bool(value.get("tool_calls"))
    for key in (role_key, content_key):
        if key not in value and not (key == content_key and calls_tools):
            raise ValueError(f'no "{key}"; it has: {", ".join(sorted(value)[:10])}')
    role = _find_role(value[role_key])
    content = value.get(content_key)
    if not isinstance(content, str) and not (content is None and calls_tools):
        raise ValueError(f'"{content_key}" is {json_kind(content)}, expected a string')
    if before not in FOLLOWS[role]:
        place = f"after {before!r}" if before else "at the beginning"
        expected = ", ".join(sorted(name or "the beginning" for name in FOLLOWS[role]))
        raise ValueError(f"role {role!r} {place}; it may come after: {expected}")
    others = {key: other for key, other in value.items() if key not in (role_key, content_key)}
    return {**others, "role": role, "content": content}


def _find_role(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"the role is {json_kind(name)}, expected a string")
    role = OTHER_NAMES.get(name, name)
    if role not in FOLLOWS:
        hint = nearest(name, [*FOLLOWS, *OTHER_NAMES]) or f"known: {', '.join(FOLLOWS)}"
        raise ValueError(f"unknown role {name!r}; {hint}")
    return role
