"""Chat templates, and the process that renders them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, EnvironmentFault, RecipeError
from ..tokenizers.tokenizer import MarkedText, Tokenizer
from ..tokenizers.tokenizer_files import decoded, read_limited

# `{% generation %}` marks what the assistant says, its end-of-turn token and what follows up to the
# next turn: these tokens count in the loss.
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3}


MAX_TEMPLATE_BYTES = 2**20
SANDBOX = Path(__file__).with_name("chat_sandbox.py")


@dataclass(frozen=True)
class ChatTemplate:
    """A template and what it finds beside the messages.

    Args:
        template: Jinja.
        place: what to call it in messages.
        variables: such as `bos_token`.
        date: what `strftime_now` tells it, as YYYY-MM-DD.
        eos_token: the text of the end-of-document token, if it has one.
    """

    template: str
    place: str
    variables: Mapping[str, Any]
    date: str
    eos_token: str = ""

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever the same messages may give another text."""
        return xxh3_128_hexdigest(json.dumps(asdict(self), sort_keys=True).encode())


def find_template(
    tokenizer: Tokenizer,
    name: str = "tokenizer",
    file: str = "",
    variables: Mapping[str, Any] | None = None,
    date: str = "2024-07-26",
) -> ChatTemplate:
    """Return the template that a recipe means.

    Args:
        tokenizer: whose special tokens it finds as variables.
        name: "tokenizer": the one that came with it; or one of `TEMPLATES`.
        file: a file that holds it; wins over the name.
        variables: more of them.
        date: what it takes for today.

    Raises:
        RecipeError: there is no such template.
        DataError: the file cannot be read.
    """
    if file:
        hint = "template_file is a Jinja file"
        text, place = decoded(Path(file), read_limited(Path(file), MAX_TEMPLATE_BYTES, hint)), file
    elif name == "tokenizer":
        if tokenizer.chat_template is None:
            known = ", ".join(f'"{each}"' for each in TEMPLATES)
            raise RecipeError(
                "the tokenizer brings no chat template",
                f"set the source's template ({known}) or template_file",
            )
        text, place = tokenizer.chat_template, "the tokenizer's chat template"
    else:
        text, place = TEMPLATES[name], f'the template "{name}"'
    if len(text.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise DataError(f"{place}: larger than {MAX_TEMPLATE_BYTES >> 20} MiB")
    special = dict(tokenizer.special_tokens)
    return ChatTemplate(
        text, place, {**special, **(variables or {})}, date, special.get("eos_token", "")
    )


class ChatRenderer:
    """A process that renders one template; `chat_sandbox.py` says why it is one.

    Args:
        template: what it renders.

    Raises:
        DataError: the template is not valid.
        EnvironmentFault: `jinja2` is not installed.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        _need_jinja()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SANDBOX)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONUTF8": "1"},
        )
        try:
            self._ask(
                template=template.template, variables=dict(template.variables), date=template.date
            )
        except ValueError as error:
            self.close()
            raise DataError(f"{template.place}: {error}") from error

    def document(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, learn: str = "assistant"
    ) -> MarkedText:
        """Return a conversation's text, without the end-of-document token at its end.

        Args:
            messages: with role and content.
            tools: descriptions of functions, or None.
            learn: "assistant": its turns; "all".

        Raises:
            ValueError: the template refuses them, or nothing in them is learned.
            DataError: the template took too much time or memory.
        """
        reply = self._ask(messages=list(messages), tools=tools, mode=learn)
        text, learned = reply["text"], [(start, stop) for start, stop in reply["learned"]]
        if not learned or not text:
            raise ValueError("the template marks nothing in it as the assistant's")
        eos = self.template.eos_token
        if eos and learned[-1][1] == len(text) and text.endswith(eos):
            # The token store writes one after every document, learned if what it ends is.
            text = text[: -len(eos)]
            learned = [(min(start, len(text)), min(stop, len(text))) for start, stop in learned]
        return MarkedText(text, tuple(learned))

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that the assistant's next answer continues.

        Raises:
            ValueError: the template refuses the messages.
            DataError: the template took too much time or memory.
        """
        return str(self._ask(messages=list(messages), tools=None, mode="prompt")["text"])

    def end_of_answer(self) -> str:
        """Return what the template writes after an answer, without white space; may be empty.

        Raises:
            ValueError: the template refuses a question and an answer.
            DataError: the template took too much time or memory.
        """
        talk = [{"role": "user", "content": "Ready?"}, {"role": "assistant", "content": "Ready."}]
        text = str(self._ask(messages=talk, tools=None, mode="all")["text"])
        return text.rpartition("Ready.")[2].strip()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, **request: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise DataError(
                f"{self.template.place}: {self._how_it_ended()}", "use another template"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGALRM:
            return "rendering one conversation took more than 10 seconds"
        return f"rendering ended with code {code}"


def _need_jinja() -> None:
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise EnvironmentFault(
            "chat templates need the jinja2 package", 'pip install "trainer[hf]"'
        ) from error


def rendering(template: ChatTemplate) -> closing[ChatRenderer]:
    """Run a renderer for as long as the block lasts."""
    return closing(ChatRenderer(template))
