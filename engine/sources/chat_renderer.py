"""Finds chat templates and renders conversations with them in a sandboxed process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, RecipeError
from ..core.registry import require_package
from ..tokenizers.tokenizer import MaskedDocument, Tokenizer
from ..tokenizers.tokenizer_files import decode_text, read_limited

# `{% generation %}` marks the tokens that count in the loss: the assistant's text, the end-of-turn
# token and the characters up to the next turn.
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
    """A template and the variables that it may use beside the messages.

    Args:
        template: the Jinja source.
        place: the name of the template in messages.
        variables: further variables, such as `bos_token`.
        date: the date that `strftime_now` gives, as YYYY-MM-DD.
        eos_token: the text of the end-of-document token; empty if there is none.
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
    """Return the chat template that a recipe names.

    Args:
        tokenizer: the tokenizer, whose special tokens become variables.
        name: "tokenizer" for the template of the tokenizer's files, or one of `TEMPLATES`.
        file: a file with the template, which overrides the name; empty for none.
        variables: further variables for the template.
        date: the date that `strftime_now` gives.

    Raises:
        RecipeError: the tokenizer has no chat template.
        DataError: the file cannot be read.
    """
    if file:
        content = read_limited(Path(file), MAX_TEMPLATE_BYTES, "template_file is a Jinja file")
        text, place = decode_text(Path(file), content), file
    elif name != "tokenizer":
        text, place = TEMPLATES[name], f'the template "{name}"'
    elif tokenizer.chat_template is not None:
        text, place = tokenizer.chat_template, "the tokenizer's chat template"
    else:
        known = ", ".join(f'"{each}"' for each in TEMPLATES)
        raise RecipeError(
            "the tokenizer brings no chat template",
            f"set the source's template ({known}) or template_file",
        )
    if len(text.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise DataError(f"{place}: larger than {MAX_TEMPLATE_BYTES >> 20} MiB")
    special = dict(tokenizer.special_tokens)
    return ChatTemplate(
        text, place, {**special, **(variables or {})}, date, special.get("eos_token", "")
    )


@dataclass(frozen=True)
class ChatRenderer:
    """Renders one template in a process of `chat_sandbox.py`, because templates are not trusted.

    Attributes:
        template: the template.
        process: the sandboxed process, which answers one line of JSON with another.
    """

    template: ChatTemplate
    process: subprocess.Popen[str]

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, learn: str = "assistant"
    ) -> MaskedDocument:
        """Return the text of a conversation, without the end-of-document token at its end.

        Args:
            messages: the messages, with `role` and `content`.
            tools: descriptions of functions for the template, or None.
            learn: "assistant" if only the assistant's tokens count in the loss, else "all".

        Raises:
            ValueError: the template rejects the messages, or no token counts in the loss.
            DataError: the template took too much time or memory.
        """
        reply = self.ask(messages=messages, tools=tools, mode=learn)
        text, ranges = reply["text"], [(start, stop) for start, stop in reply["loss_ranges"]]
        if not ranges or not text:
            raise ValueError("the template marks nothing in it as the assistant's")
        eos = self.template.eos_token
        if eos and ranges[-1][1] == len(text) and text.endswith(eos):
            # The token store appends the token to every document, and counts it in the loss if
            # the end of the text counts.
            text = text[: -len(eos)]
            ranges = [(min(start, len(text)), min(stop, len(text))) for start, stop in ranges]
        return MaskedDocument(text, tuple(ranges))

    def render_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt text after which the assistant's next answer begins.

        Raises:
            ValueError: the template refuses the messages.
            DataError: the template took too much time or memory.
        """
        return str(self.ask(messages=messages, tools=None, mode="prompt")["text"])

    def render_answer(
        self, prompt: Sequence[Mapping[str, Any]], text: str, answer: Sequence[Mapping[str, Any]]
    ) -> str:
        """Return the text of an answer, without the end-of-document token at its end.

        Args:
            prompt: the messages before the answer.
            text: the text of the prompt, as `render_prompt` returns it.
            answer: the messages of the answer.

        Raises:
            ValueError: the template refuses the messages, or the conversation does not begin with
                the prompt's text.
            DataError: the template took too much time or memory.
        """
        if not answer or answer[-1]["role"] != "assistant":
            raise ValueError("the last message of an answer is not the assistant's")
        whole = str(self.ask(messages=[*prompt, *answer], tools=None, mode="all")["text"])
        if not whole.startswith(text):
            raise ValueError(
                "the template writes the prompt in another way once an answer follows, so where "
                "the answer begins cannot be told; use another template"
            )
        eos = self.template.eos_token
        return whole[len(text) :].removesuffix(eos) if eos else whole[len(text) :]

    def find_end_of_answer(self) -> str:
        """Return the text, such as an end-of-turn token, that the template writes after an answer.

        White space around the text is removed. The text may be empty.

        Raises:
            ValueError: the template refuses a question and an answer.
            DataError: the template took too much time or memory.
        """
        talk = [{"role": "user", "content": "Ready?"}, {"role": "assistant", "content": "Ready."}]
        text = str(self.ask(messages=talk, tools=None, mode="all")["text"])
        return text.rpartition("Ready.")[2].strip()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request of the sandbox's protocol, and return the reply.

        Raises:
            ValueError: the template refuses the request.
            DataError: the template took too much time or memory.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        if not line:
            code = self.process.wait()
            reason = f"rendering ended with code {code}"
            if code == -signal.SIGALRM:
                reason = "rendering one conversation took more than 10 seconds"
            raise DataError(f"{self.template.place}: {reason}", "use another template")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply


@contextmanager
def open_renderer(template: ChatTemplate) -> Iterator[ChatRenderer]:
    """Start a process that renders a template, and end it when the block ends.

    Raises:
        DataError: the template is not valid.
        EnvironmentFault: `jinja2` is not installed.
    """
    require_package("jinja2", "a chat template", "hf")
    process = subprocess.Popen(
        [sys.executable, "-P", str(SANDBOX)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    try:
        renderer = ChatRenderer(template, process)
        try:
            renderer.ask(
                template=template.template, variables=dict(template.variables), date=template.date
            )
        except ValueError as error:
            raise DataError(f"{template.place}: {error}") from error
        yield renderer
    finally:
        process.kill()
        process.communicate()
