"""Links between the documents lead somewhere."""

import pytest

from tests.docs.pages import DOCUMENTS, anchors, links
from tests.docs.walk import ROOT


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_headings(document):
    here = ROOT / document
    broken = []
    for path, anchor in links(document):
        target = (here.parent / path).resolve() if path else here
        name = target.relative_to(ROOT).as_posix()
        if not target.exists() or (anchor and anchor not in anchors(name)):
            broken.append(f"{path}#{anchor}")
    assert broken == []


def test_the_index_leads_to_every_page():
    named = {(ROOT / "docs" / path).resolve() for path, _ in links("docs/README.md")}
    pages = {path for path in DOCUMENTS if path.startswith("docs/")} - {"docs/README.md"}
    assert [page for page in sorted(pages) if ROOT / page not in named] == []


def test_every_guide_begins_with_one_heading_and_a_sentence():
    for document in DOCUMENTS:
        if document.startswith("docs/guide/"):
            first, second, third, *_ = (ROOT / document).read_text("utf-8").splitlines()
            assert first.startswith("# "), document
            assert (second, third != "") == ("", True), document
