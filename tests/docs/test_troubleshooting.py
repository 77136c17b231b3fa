"""The page of messages: each is one that the code prints, and every exit code is there."""

import ast
import re
from functools import cache

import pytest

from tests.docs.walk import ROOT
from trainer.engine.errors import ExitCode

PAGE = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
HEADINGS = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
HOLE = "\0"


@cache
def printed():
    """Return every text in the code, with a hole for each value that is filled in."""
    found = set()
    for folder in ("cli", "engine", "model_zoo"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
            documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if id(node) in documented:
                    continue
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    # Templates of str.format and %-style have holes of their own.
                    found.add(re.sub(r"\{\w*\}|%s", HOLE, node.value))
                elif isinstance(node, ast.JoinedStr):
                    found.add("".join(map(_part, node.values)))
    return found


def _part(node):
    return node.value if isinstance(node, ast.Constant) else HOLE


def test_a_heading_is_one_message_in_code_style():
    assert [each for each in HEADINGS if not re.fullmatch(r"`[^`]+`", each)] == []
    assert len(set(HEADINGS)) == len(HEADINGS) >= 50


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_code_prints_this_message(heading):
    message = re.sub(r"<[a-z]+>", HOLE, heading.strip("`"))
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
