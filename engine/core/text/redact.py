"""Takes secrets out of what is written and sent: recipes, reports, trackers. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RecipeError

MARK = "[redacted]"
_KEY = re.compile(
    r"(.*_)?(api_?key|access_key|secret|secret_key|password|passwd|credentials?"
    r"|(access|api|auth|bearer|hf)_token)|token",
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


def redacted(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """Return plain data without secrets.

    These are texts under keys such as `api_key`, the values of environment variables with such
    names wherever they stand, users and passwords in URLs, and signatures of URLs.
    """
    secrets = [
        text for name, text in environ.items() if _VARIABLE.search(name) and len(text) >= _SHORTEST
    ]
    return _clean(value, sorted(secrets, key=len, reverse=True))


def without_secrets(value: Any) -> Any:
    """Return plain data as it is kept on the disk: `redacted`, but for variables' values.

    Such a value may be an ordinary word or folder, and what is kept must still be of use.
    """
    return redacted(value, {})


def without_secret(override: str) -> str:
    """Return a `KEY=VALUE` setting as it is kept on the disk."""
    key, equals, value = override.partition("=")
    name = key.rpartition(".")[2]
    return f"{key}{equals}{without_secrets({name: value})[name]}"


def require_no_secret(overrides: Sequence[str]) -> None:
    """Refuse `KEY=VALUE` settings with secrets where they would be written to a script.

    Raises:
        RecipeError: one has a secret.
    """
    for override in overrides:
        if without_secret(override) != override:
            raise RecipeError(
                f"{override.partition('=')[0]}: the script would hold its password",
                "write it in the recipe's file, or give it by the environment",
            )


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
