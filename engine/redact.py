"""Takes secrets out of what leaves the run directory: reports and trackers. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MARK = "[redacted]"
_KEY = re.compile(
    r"(.*_)?(api_?key|access_key|secret|secret_key|password|passwd|credentials?"
    r"|(access|api|auth|bearer|hf)_token)|token",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8  # `false` and `1` are values of such variables too
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SIGNED = re.compile(
    r"(?<=[?&])((?:x-amz-|x-goog-)?(?:signature|credential|security-token|token|sig|key)=)[^&#\s]+",
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
