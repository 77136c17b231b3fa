"""Which documents there are, their headings, and where their links lead."""

import re

from tests.docs.blocks import FENCE, blocks
from tests.docs.walk import ROOT

DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(
        {*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/README.md"), *ROOT.glob("docs/**/*.md")}
    )
]
# Made from the recipes and the registries: other tests look at what they are made from.
GENERATED = "docs/reference/"
FOLLOWED = [
    document
    for document in DOCUMENTS
    if not document.startswith(GENERATED) and blocks(ROOT / document)
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(document):
    """Return a document without its fenced blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", (ROOT / document).read_text("utf-8")))


def anchors(document):
    """Return what GitHub makes of a document's headings."""
    text = FENCE.sub("", (ROOT / document).read_text("utf-8"))
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = next(count for count in range(1000) if _numbered(slug, count) not in found)
        found.add(_numbered(slug, number))
    return found


def _numbered(slug, count):
    return f"{slug}-{count}" if count else slug


def links(document):
    """Return the places in this repository that a document leads to: (path, anchor)."""
    found = []
    for link in LINK.findall(prose(document)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            found.append((path, anchor))
    return found
