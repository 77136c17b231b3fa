"""A program that renders chat templates in a process of its own, so that none can do harm.

A template comes with a tokenizer from a stranger. Jinja's sandbox keeps it from reaching
Python's objects; that this is another process, with limits on time, memory and files, keeps it from
taking the machine. It reads a JSON object a line and answers each with one:

    {"template": ..., "variables": {...}, "date": "2024-07-26"}  ->  {} or {"error": ...}
    {"messages": [...], "tools": [...], "mode": ...}  ->  {"text": ..., "loss_ranges": [[0, 3]]}

`mode` is "assistant" or "all" for what counts in the loss, or "prompt" for the text up to the
answer.

What templates find is what transformers gives them:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 10
MAX_MEMORY_BYTES = 2**31
MAX_CHARACTERS = 2**24
MAX_REASON_CHARACTERS = 1000

Message = dict[str, Any]


class Generation(Extension):
    """The Jinja tag `{% generation %}`, which marks the assistant's text."""

    tags = {"generation"}

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        environment.extend(has_generation=False, rendered=0, answers=[])

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a call that records its position."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        vars(self.environment)["has_generation"] = True
        return nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Callable[[], str]) -> str:
        text = caller()
        start = vars(self.environment)["rendered"]
        vars(self.environment)["answers"].append((start, text))
        return text


class Renderer:
    """A compiled template.

    Args:
        template: the Jinja source.
        variables: the variables besides the messages, such as `bos_token`.
        today: the date that `strftime_now` gives.
    """

    def __init__(self, template: str, variables: dict[str, Any], today: date) -> None:
        self.environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        self.environment.filters["tojson"] = _to_json
        self.environment.globals["raise_exception"] = _raise_exception
        self.environment.globals["strftime_now"] = today.strftime
        self.template = self.environment.from_string(template)
        self.variables = variables

    def render(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> str:
        """Return the text of a conversation.

        Args:
            messages: the messages, with `role` and `content`.
            tools: descriptions of functions, or None.
            prompt: True to end with the beginning of an assistant turn.

        Raises:
            ValueError: the text is longer than `MAX_CHARACTERS`.
        """
        self.environment.rendered, self.environment.answers = 0, []
        pieces = []
        ours = {"messages": messages, "tools": tools, "documents": None}
        ours["add_generation_prompt"] = prompt
        for piece in self.template.generate({**self.variables, **ours}):
            pieces.append(piece)
            self.environment.rendered += len(piece)
            if self.environment.rendered > MAX_CHARACTERS:
                raise ValueError(f"the template wrote more than {MAX_CHARACTERS} characters")
        return "".join(pieces)

    def render_masked(
        self, messages: Sequence[Message], tools: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation and the character ranges of the assistant's messages.

        Raises:
            ValueError: the ranges cannot be found with this template.
        """
        text = self.render(messages, tools)
        if not self.environment.has_generation:
            return text, list(self._find_answers(messages, tools, text))
        answers = self.environment.answers
        if any(text[start : start + len(answer)] != answer for start, answer in answers):
            raise ValueError("a {% generation %} block of the template is inside a macro or filter")
        return text, [(start, start + len(answer)) for start, answer in answers if answer]

    def _find_answers(self, messages: Sequence[Message], tools: Any, text: str) -> Any:
        """Yield the range of each answer, found by rendering the messages with and without it."""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:index], tools, prompt=True)
            after = self.render(messages[: index + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"messages[{index}]: the template writes earlier turns in another way once "
                    "later ones follow, so where this one lies cannot be told; use a template with "
                    "{% generation %} blocks around the assistant's text"
                )
            if len(before) < len(after):
                yield len(before), len(after)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return plain JSON, because Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _with_reasoning(message: Message) -> Message:
    """Store an answer's reasoning under every key that templates read."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def reply_to(renderer: Renderer, request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request: the rendered text, or an error message."""
    messages = [_with_reasoning(message) for message in request["messages"]]
    tools, mode = request["tools"], request["mode"]
    try:
        if mode == "prompt":
            return {"text": renderer.render(messages, tools, prompt=True)}
        if mode == "all":
            text = renderer.render(messages, tools)
            return {"text": text, "loss_ranges": [(0, len(text))]}
        text, ranges = renderer.render_masked(messages, tools)
    except MemoryError:
        return {"error": f"the template needs more than {MAX_MEMORY_BYTES >> 30} GiB of memory"}
    except Exception as error:  # a template may raise anything
        return {"error": _reason(error)}
    return {"text": text, "loss_ranges": ranges}


def _reason(error: Exception) -> str:
    text = str(error)[:MAX_REASON_CHARACTERS]
    if isinstance(error, ValueError):
        return text
    line = getattr(error, "lineno", None)
    place = f" in its line {line}" if line else ""
    return f"the template stopped{place}: {text} ({type(error).__name__})"


def _limit() -> None:
    """Limit memory, and forbid opening files, writing files and starting processes."""
    limits = {
        resource.RLIMIT_AS: MAX_MEMORY_BYTES,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def _preload() -> None:
    """Render a template and an error once, so that Jinja imports its modules before the limits."""
    renderer = Renderer("{{ 'x' | upper }}{{ messages.x.y }}", {}, date.today())
    reply_to(renderer, {"messages": [], "tools": None, "mode": "all"})


def main() -> None:
    """Answer requests until the input ends. An alarm kills the process if one takes too long."""
    _preload()
    _limit()
    renderer: Renderer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(MAX_SECONDS)
        if renderer is None:
            reply = {}
            try:
                today = date.fromisoformat(request["date"])
                renderer = Renderer(request["template"], request["variables"], today)
            except (Exception, RecursionError) as error:
                reply = {"error": _reason(error)}
        else:
            reply = reply_to(renderer, request)
        signal.alarm(0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
