"""Answers to a prompt, as text or as messages that a chat template lays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .chat import OTHER_NAMES, parse_messages
from .chat_renderer import ChatRenderer

PAIR = ("chosen", "rejected")
"""the fields of two answers; a single one is `answer`"""


def answer_names(values: Mapping[str, Any]) -> list[str]:
    """Return the fields of a record or sample that are answers to its prompt."""
    return [name for name in (*PAIR, "answer") if name in values]


def holds_messages(values: Mapping[str, Any]) -> bool:
    """Return whether the answers of a record are lists of messages."""
    return any(isinstance(values[name], list) for name in answer_names(values))


def render_answers(
    renderer: ChatRenderer, values: Mapping[str, Any], role_key: str, content_key: str
) -> dict[str, Any]:
    """Return a record of answers with text in place of messages.

    The prompt is a list of messages as well. If it is not, it is the messages with which both
    answers begin, or all but the last one of a single answer, or else a message of the user.

    Args:
        renderer: renders the chat template.
        values: the fields chosen and rejected, or answer, and perhaps prompt.
        role_key: the key of a message that says whose it is.
        content_key: the key of a message that holds its text.

    Raises:
        ValueError: the messages are not as expected, or the template rejects them.
    """
    prompt = values.get("prompt", "")
    given = {name: values[name] for name in answer_names(values)}
    first, last = next(iter(given)), list(given)[-1]
    messages: list[dict[str, Any]] = []
    if isinstance(prompt, list):
        messages = parse_messages(prompt, "prompt", role_key, content_key)
        before = messages[-1]["role"] if messages else ""
    else:
        before = "user" if _begins_with_answer(given[first], role_key) else ""
    answers = {
        name: parse_messages(answer, name, role_key, content_key, before)
        for name, answer in given.items()
    }
    if not isinstance(prompt, list):
        shared = _count_shared(answers[first], answers[last])
        messages = answers[first][:shared]
        answers = {name: answer[shared:] for name, answer in answers.items()}
        if prompt and not messages:
            messages = [{"role": "user", "content": prompt}]
    if not messages:
        raise ValueError("chosen and rejected begin with different messages: there is no prompt")
    text = renderer.render_prompt(messages)
    rendered = {
        name: renderer.render_answer(messages, text, answer) for name, answer in answers.items()
    }
    return {"prompt": text, **rendered}


def _begins_with_answer(messages: Any, role_key: str) -> bool:
    first = messages[0] if isinstance(messages, list) and messages else None
    role = first.get(role_key) if isinstance(first, dict) else None
    return isinstance(role, str) and OTHER_NAMES.get(role, role) == "assistant"


def _count_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return with how many equal messages two conversations begin; each keeps its last one."""
    shared = 0
    while shared < min(len(one), len(other)) - 1 and one[shared] == other[shared]:
        shared += 1
    return shared
