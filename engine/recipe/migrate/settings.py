"""Read the settings of another trainer from a file: TOML, or YAML without code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.errors import Problem, RecipeError
from ...core.files import UnusableFile, open_regular
from ...core.registry import require_package
from ...core.text.display import make_printable
from ..read import MAX_BYTES, read_toml

MOST_SETTINGS = 2000


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML or YAML file as nested plain data.

    Raises:
        RecipeError: the file cannot be read, or is no table of settings.
        EnvironmentFault: PyYAML is not installed.
    """
    if path.suffix == ".toml":
        return read_toml(path).tree
    yaml = require_package("yaml", "a YAML file", "hf")
    name = make_printable(str(path))
    try:
        with open_regular(path) as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise _fault(name, f"is larger than {MAX_BYTES:,} bytes")
        found = _bounded_loader(yaml)(text.decode("utf-8-sig")).get_single_data()
    except UnusableFile as error:
        raise _fault(name, str(error.strerror)) from None
    except OSError as error:
        raise _fault(name, f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        reason = getattr(error, "problem", None) or str(error) or "nested too deep"
        raise RecipeError([Problem(f"is not YAML: {reason}", "", name, *place)]) from None
    except (AttributeError, LookupError, TypeError):  # PyYAML's, as for `!!int ""`
        raise _fault(name, "is not YAML: a value does not fit its tag") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise _fault(name, "expected a table of settings")
    return found


def _bounded_loader(yaml: Any) -> Any:
    """Return the loader of plain data, which refuses merge keys that make few bytes large."""

    class BoundedLoader(yaml.SafeLoader):  # type: ignore[misc]  # its base is known when it runs
        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > MOST_SETTINGS:
                raise ValueError(f"merge keys make more than {MOST_SETTINGS:,} settings")

    return BoundedLoader


def _fault(name: str, message: str) -> RecipeError:
    return RecipeError([Problem(message, "", name)])
