"""Chat templates as models are published with, conversations, and a small tokenizer for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.engine.corpus.train_tokenizer import train_tokenizer
from trainer.engine.sources.chat import ChatSource
from trainer.engine.sources.chat_renderer import ChatTemplate
from trainer.engine.sources.python_library import PythonSource

SPECIAL = [
    "</s>", "<s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
]  # fmt: skip

QWEN = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}\
{% else %}{{ raise_exception('only user and assistant are supported') }}{% endif %}\
{% endfor %}"""

DATED = """\
{%- set ns = namespace(day=strftime_now("%d %b %Y")) %}
{{- '<|begin_of_text|>Today: ' + ns.day + '\\n' }}
{%- if tools is not none %}{{- tools | tojson(indent=2) }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- '[' + message.content | tojson + ']' }}
    {%- elif message.tool_calls is defined %}
        {%- generation %}{{ message.tool_calls[0].function | tojson + '<|eot_id|>' -}}
        {% endgeneration %}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] | trim }}<|eot_id|>{% endgeneration %}
    {%- else %}
        {{- message.role | upper + ': ' + message['content'] | trim + '<|eot_id|>\\n' }}
    {%- endif %}
    {%- if message.role == 'never' %}{% break %}{% endif %}
{%- endfor %}"""

FORGETFUL = """\
{% for message in messages %}{{ message.role }}: \
{% if message.role == 'assistant' and not loop.last %}...{% else %}{{ message.content }}{% endif %}
{% endfor %}"""

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "What is  2 + 2? <|im_end|>"},
    {"role": "assistant", "content": " It is 4. 東京 🎉 "},
    {"role": "user", "content": "And\n3?\n"},
    {"role": "assistant", "content": "Ünd 6."},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *TALK]
TOOLS = [{"type": "function", "function": {"name": "add", "description": 'a <b> "c" é'}}]
CALL = [
    TALK[0],
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
    {"role": "tool", "content": "4 & <5>"},
    {"role": "assistant", "content": "4"},
]


def make_tokenizer(folder: Path) -> Path:
    """Train a small tokenizer that knows the special tokens of the templates."""
    source = PythonSource(max_bytes=60_000)
    train_tokenizer([source], folder, vocab_size=500, special_tokens=SPECIAL)
    return folder


def chats(path: Path, **settings: Any) -> ChatSource:
    """Return a source of conversations."""
    return ChatSource(path=str(path), **{"template": "chatml", **settings})


def template(text: str, **settings: Any) -> ChatTemplate:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    settings = {"variables": variables, "date": "2024-07-26", "eos_token": "</s>", **settings}
    return ChatTemplate(text, "the template", **settings)
