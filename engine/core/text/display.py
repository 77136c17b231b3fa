"""Keys, values and foreign text as messages show them: short, safe, without secrets. Torch-free."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import date, time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .positions import KeyPath


def make_printable(text: str) -> str:
    """Escape what a terminal would act upon or could not show, line ends included."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def make_lines_printable(text: str) -> str:
    """Do the same to each line of a text."""
    return "\n".join(map(make_printable, text.split("\n")))


MAX_SHOWN = 20


def list_problems(heading: str, problems: list[str]) -> str:
    """Return a heading with the first problems below it."""
    some = problems[:MAX_SHOWN]
    if len(problems) > len(some):
        some.append(f"and {len(problems) - len(some)} more")
    return "\n  ".join([heading, *some])


def list_words(words: Sequence[str]) -> str:
    """Return words as a sentence lists them, such as "a, b and c"; there is at least one."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def quote_name(name: str) -> str:
    """Return a foreign name as it may be printed."""
    return name if name.isprintable() and 0 < len(name) <= 200 else repr(name[:200])


LONGEST = 60


def shorten(text: str) -> str:
    """Cut a long text in the middle."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 20]}...{text[-15:]}"


def join_key(path: KeyPath) -> str:
    """Return `data.sources.0.weight`; odd parts are quoted."""
    return ".".join(quote_part(part) for part in path)


def format_key(path: KeyPath) -> str:
    """Return the dotted key as a message shows it."""
    return shorten(make_printable(join_key(path)))


def quote_part(part: str | int) -> str:
    """Return one part of a key as TOML writes it."""
    text = str(part)
    if re.fullmatch(r"[A-Za-z0-9_-]+", text):
        return text
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_value(value: Any) -> str:
    """Return a value roughly as TOML writes it."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return shorten(f"[{', '.join(format_value(item) for item in value[:20])}]")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return shorten(make_printable(json.dumps(value[:1000], ensure_ascii=False)))
    if isinstance(value, date | time):
        return value.isoformat()
    return "none" if value is None else shorten(str(value))


MARK = "[redacted]"
_KEY = re.compile(
    r"(.*_)?(api_?key|access_key|secret|secret_key|password|passwd|credentials?"
    r"|(access|api|auth|bearer|hf)_token)|token",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    r"((?<![A-Za-z])(?:api_?key|access_key|secret|secret_key|password|passwd|credentials?"
    r"|(?:access|api|auth|bearer|hf)_token|token)[\"']?\s*[:=]=?\s*[\"']?)[^\s\"',;]{4,}",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8  # `false` and `1` are values of such variables too
_USER_INFO = re.compile(r"(?<=://)[^/?#\s\"<>]+(?=@)")
_SIGNED = re.compile(
    r"(?<=[?&])((?:x-amz-|x-goog-|[a-z]+[_-])?(?:signature|credential|security-token|token|sig|key"
    r"|password|passwd|pwd|secret)=)[^&#\s]+",
    re.IGNORECASE,
)


def describe_changes(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return each value that differs from a known one, such as `seq_len was 64 and is 32`.

    Args:
        known: the values that were recorded.
        wanted: the values of now, as JSON has them; keys that it lacks are not compared.
    """
    return "; ".join(
        f"{key} was {format_value(known.get(key))} and is {format_value(value)}"
        for key, value in wanted.items()
        if known.get(key) != value
    )


def redact(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """Return plain data without secrets.

    These are texts under keys such as `api_key`, the values of environment variables with such
    names wherever they stand, users and passwords in URLs, and signatures of URLs.
    """
    secrets = [
        text for name, text in environ.items() if _VARIABLE.search(name) and len(text) >= _SHORTEST
    ]
    # The longest first: one secret may contain another.
    return _clean(value, sorted(secrets, key=len, reverse=True))


def remove_secrets(value: Any) -> Any:
    """Return plain data as it is kept on the disk: `redact`, but for variables' values.

    Such a value may be an ordinary word or folder, and what is kept must still be of use.
    """
    return redact(value, {})


def redact_text(text: str) -> str:
    """Return lines of any language without secrets: also values after names such as `api_key =`."""
    return _ASSIGNED.sub(rf"\1{MARK}", redact(text))


def remove_secret(override: str) -> str:
    """Return a `KEY=VALUE` setting as it is kept on the disk."""
    key, equals, value = override.partition("=")
    name = key.rpartition(".")[2]
    return f"{key}{equals}{remove_secrets({name: value})[name]}"


def _clean(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: MARK
            if isinstance(inner, str) and inner and _KEY.fullmatch(str(key))
            else _clean(inner, secrets)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_clean(inner, secrets) for inner in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, MARK)
    return _SIGNED.sub(rf"\1{MARK}", _USER_INFO.sub(MARK, value))
