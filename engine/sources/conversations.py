"""Checks the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import nearest
from .files import json_kind

if TYPE_CHECKING:
    from .chat_configs import ChatSource

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
