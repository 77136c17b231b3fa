"""The page of messages: each is one that the code prints, and every exit code is there."""

import ast
import re
from functools import cache

import pytest

from tests.docs.walk import ROOT
from trainer.engine.core.errors import ExitCode, TrainerError

PAGE = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
HEADINGS = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
HOLE = "\0"
ERRORS = {each.__name__: each.exit_code for each in TrainerError.__subclasses__()}
ERRORS["Problem"] = ExitCode.RECIPE


@cache
def sources():
    """Return the nodes of every module of the product."""
    paths = [
        path for part in ("cli", "engine", "model_zoo") for path in (ROOT / part).rglob("*.py")
    ]
    return [list(ast.walk(ast.parse(path.read_text("utf-8")))) for path in paths]


@cache
def printed():
    """Return every text in the code, with a hole for each value that is filled in."""
    found = set()
    for nodes in sources():
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found |= {_text(node) for node in nodes if id(node) not in documentation}
    return found


@cache
def raised():
    """Return (text, exit code) of every error that is made with its text in place."""
    return {
        (_text(node.args[0]), ERRORS[node.func.id])
        for nodes in sources()
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS and node.args
    }


def _text(node):
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_part, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # Templates of str.format and %-style have holes of their own.
        return re.sub(r"\{\w*\}|%s", HOLE, node.value)
    return ""


def _part(node):
    return node.value if isinstance(node, ast.Constant) else HOLE


def _message(heading):
    return re.sub(r"<[a-z]+>", HOLE, heading.strip("`"))


def test_a_heading_is_one_message_in_code_style():
    assert [each for each in HEADINGS if not re.fullmatch(r"`[^`]+`", each)] == []
    assert len(set(HEADINGS)) == len(HEADINGS) >= 50


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_code_prints_this_message(heading):
    message = _message(heading)
    assert len(message.replace(HOLE, "").strip()) >= 7, "says too little to be searched for"
    assert any(message in text for text in printed()), "no text in the code has these words"


def test_a_message_that_the_code_does_not_have_is_noticed():
    assert not any("no such words are ever printed" in text for text in printed())


@pytest.mark.parametrize("code", [code for code in ExitCode if code])
def test_every_exit_code_has_a_section_with_advice(code):
    section = re.search(rf"^## Exit code {code.value}: .*?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert section
    advice = re.sub(r"^#+ .*$", "", section[1], flags=re.MULTILINE)
    assert len(advice.split()) > 10


def test_every_message_has_advice():
    for part in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        assert len(re.split(r"^## ", text, flags=re.MULTILINE)[0].split()) >= 6, heading


def test_a_message_stands_under_the_exit_code_that_it_comes_with():
    checked = 0
    for code, section in re.findall(
        r"^## Exit code (\d+): .*?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S
    ):
        for heading in re.findall(r"^### (.*)$", section, re.MULTILINE):
            codes = {number for text, number in raised() if _message(heading) in text}
            assert not codes or int(code) in codes, f"{heading}: {codes}"
            checked += bool(codes)
    assert checked >= 30
