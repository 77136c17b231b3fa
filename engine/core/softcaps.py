"""Says whether a function of a plugin takes the softcap that some models have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .errors import Problem


def check_softcap(function: Callable[..., Any], capped: str, key: str, name: str) -> list[Problem]:
    """Return a problem if a function has no parameter `softcap`.

    Args:
        function: an implementation of attention or of the loss.
        capped: what the model caps, "attention scores" or "logits".
        key: the recipe's key that names the function.
        name: the value of that key.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # functions in C do not say
        return []
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if takes_all or "softcap" in parameters:
        return []
    message = f'"{name}" has no parameter "softcap", and this model caps {capped}'
    hint = "add the parameter softcap: float | None = None, or choose another one"
    return [Problem(message, key, hint=hint)]
