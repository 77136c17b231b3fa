"""Which replica group this process belongs to, as its environment says. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from ...core.errors import EnvironmentFault

if TYPE_CHECKING:
    from ...recipe.schema import Recipe

LIGHTHOUSE, GROUP = "TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID"
"""the variables of torchft and of its examples"""


@dataclass(frozen=True)
class Replica:
    """One replica group of a federation.

    Attributes:
        number: number of the group, counted from 0.
        lighthouse: address of torchft's lighthouse, `http://host:port`.
    """

    number: int
    lighthouse: str

    @classmethod
    def find(cls, count: int, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the replica group of this process.

        Args:
            count: number of replica groups.
            environ: the environment variables.

        Raises:
            EnvironmentFault: a variable is missing or malformed.
        """
        number, address = environ.get(GROUP, ""), environ.get(LIGHTHOUSE, "")
        hint = 'carrier = "elastic" starts each replica group with its own number, from 0'
        if not re.fullmatch("[0-9]{1,5}", number) or int(number) >= count:
            message = f"{GROUP} is {number!r}, not a number from 0 to {count - 1}"
            raise EnvironmentFault(message if number else f"{GROUP} is not set", hint)
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            message = f"{LIGHTHOUSE} is {address!r}, not http://HOST:PORT"
            hint = "start torchft_lighthouse, and set the variable to its address"
            raise EnvironmentFault(message if address else f"{LIGHTHOUSE} is not set", hint)
        return cls(int(number), address)


def name_replica(recipe: Recipe) -> Recipe:
    """Return the recipe with a run directory of the replica group's own, `NAME-replica-N`.

    Raises:
        EnvironmentFault: the environment does not say which group this is.
    """
    replica = Replica.find(recipe.parallel.replicate)
    suffix = f"-replica-{replica.number}"
    if recipe.run.name.endswith(suffix):  # the recipe of a run directory
        return recipe
    run = recipe.run.model_copy(update={"name": recipe.run.name + suffix})
    return recipe.model_copy(update={"run": run})
