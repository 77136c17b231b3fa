"""What other trainers got wrong, ours gets right, and each check notices the mistake put in."""

import pytest

from tests.known_bugs.catalogue import PAGE_FILE, mistaken, read_catalogue, write_page
from tests.known_bugs.ranks import set_mistake

CATALOGUE = read_catalogue()
ENTRIES = [
    pytest.param(subject, bug, id=bug.name, marks=[pytest.mark.matrix] if bug.world > 1 else [])
    for subject, bugs in CATALOGUE.items()
    for bug in bugs
]


@pytest.fixture(autouse=True)
def without_mistakes():
    """Leave none to later tests."""
    yield
    set_mistake(None)


@pytest.mark.parametrize(("subject", "bug"), ENTRIES)
def test_holds_and_fails_with_the_reported_mistake(subject, bug):
    bug.check()
    set_mistake((subject, bug.name))
    with mistaken(subject, bug.name), pytest.raises(AssertionError) as raised:
        bug.check()
    assert raised.type is AssertionError, "a check fails by what it asserts, not by an error"


def test_each_report_is_entered_once():
    bugs = [bug for each in CATALOGUE.values() for bug in each]
    assert len(bugs) >= 60
    assert len({bug.name for bug in bugs}) == len(bugs)
    assert len({(bug.source, bug.mistake) for bug in bugs}) == len(bugs)
    for bug in bugs:
        assert bug.mistake[0].isupper(), bug.mistake
        assert bug.mistake.endswith("."), bug.mistake


def test_the_page_lists_them_all():
    assert PAGE_FILE.read_text("utf-8") == write_page(), "python -m tests.known_bugs.catalogue"
