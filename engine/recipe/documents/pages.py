"""The reference as Markdown pages, made of what is registered and of the shipped recipes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ...core.errors import ExitCode
from ...core.text.display import format_value
from ..changes import resume_policy
from ..read import RECIPES
from ..schema import REGISTRIES
from .describe import EXTENDS
from .reference import Section, sections

MADE_BY = (
    "<!-- Made by `trainer docs --write docs/reference`. Change the sources, not this page. -->"
)
COLUMNS = ("key", "type", "default", "on resume", "what it is")


def recipe_pages() -> dict[str, str]:
    """Return every page that is about recipes: file name -> text."""
    return {
        "recipe.md": _recipe_page(),
        **{f"{kind}.md": _kind_page(kind) for kind in REGISTRIES},
        "recipes.md": _shipped_page(),
        "exit-codes.md": _exit_codes_page(),
    }


def page(title: str, *parts: str) -> str:
    """Return a page of these paragraphs."""
    return "\n\n".join([f"# {title}", MADE_BY, *(part for part in parts if part)]) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are Markdown already, but for `|`."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(each) for each in line)} |" for line in lines)


def plain(text: str) -> str:
    """Return text with what Markdown would act upon escaped, outside of `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") and len(part) > 1 else re.sub(r"([*<\[])", r"\\\1", part)
        for part in parts
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _recipe_page() -> str:
    introduction = (
        "One TOML file describes a run. These are its tables and their keys. A table whose `name` "
        "picks a component has a page for each kind: its other keys belong to the component.\n\n"
        "The column *on resume* says what a resumed run may change: *free*, or *asks*: only if "
        "`--allow-changed` names the key."
    )
    keys = [EXTENDS.key, EXTENDS.type, EXTENDS.default]
    row = (*(f"`{each}`" for each in keys), "free", EXTENDS.description)
    parts = ["## Above all tables", markdown_table(COLUMNS, [row])]
    described = set()
    for section in sections():
        # All components of a table share one section, which links to their own page.
        if section.table in described:
            continue
        described.add(section.table)
        parts.append(f"## {section.header}")
        if section.kind:
            parts.append(_choice(section))
        else:
            parts += [plain(section.summary), _keys(section)]
    return page("The recipe", introduction, *parts)


def _choice(section: Section) -> str:
    names = [each for each in sections() if each.table == section.table]
    listed = ", ".join(
        f"[`{each.component}`]({each.kind}.md#{_anchor(each.component)})" for each in names
    )
    default = next((f"; default: `{each.component}`" for each in names if each.is_default), "")
    return f"`name` is one of {listed}{default}."


def _anchor(component: str) -> str:
    """Return the anchor of a component's heading: lower case, without the dot of `torch.NAME`."""
    return component.lower().replace(".", "")


def _kind_page(kind: str) -> str:
    found = [each for each in sections() if each.kind == kind]
    first = found[0]
    more = "an entry" if first.is_list else "a table"
    parts = [f"{more.capitalize()} `{first.header}` of a recipe names one of these."]
    for section in found:
        parts.append(f"## {section.component}")
        default = " The default." if section.is_default else ""
        parts += [plain(section.summary) + default, _keys(section), _flavors(section)]
    return page(f"{kind.capitalize()}: what `{first.header}` can name", *parts)


def _keys(section: Section) -> str:
    first = f"{section.table}.0" if section.is_list else section.table
    rows = [
        (
            f"`{field.key}`",
            f"`{field.type}`",
            f"`{field.default}`",
            _on_resume(f"{first}.{field.key}"),
            plain(field.description),
        )
        for field in section.fields()
        if field.key != "name" or not section.component
    ]
    if not rows:
        return "It has no keys of its own."
    return markdown_table(COLUMNS, rows)


def _on_resume(key: str) -> str:
    words = resume_policy(key)
    return "asks" if words.startswith("only") else words.replace("may change", "free")


def _flavors(section: Section) -> str:
    flavors = getattr(section.config, "flavors", {})
    defaults = section.config.model_fields
    keys = list(dict.fromkeys(key for sizes in flavors.values() for key in sizes))
    rows = [
        (f"`{name}`", *(format_value(sizes.get(key, defaults[key].default)) for key in keys))
        for name, sizes in flavors.items()
    ]
    return markdown_table(("flavor", *(f"`{key}`" for key in keys)), rows) if rows else ""


def _shipped_page() -> str:
    introduction = (
        "`trainer new PATH --from NAME` writes one of them with a comment at every key, "
        "`trainer explain recipes/NAME.toml` shows it with every default."
    )
    parts = []
    for path in [*sorted(RECIPES.glob("*.toml")), *sorted(RECIPES.glob("base/*.toml"))]:
        name = path.relative_to(RECIPES).with_suffix("").as_posix()
        parts += [f"## {name}", f"```toml\n{path.read_text('utf-8').strip()}\n```"]
    return page("The shipped recipes", introduction, *parts)


def _exit_codes_page() -> str:
    rows = [(str(code.value), code.meaning) for code in sorted(ExitCode)]
    introduction = (
        "Every command ends with one of these. What to do about each is in "
        "[Troubleshooting](../troubleshooting.md)."
    )
    return page("Exit codes", introduction, markdown_table(("exit code", "meaning"), rows))
