"""A page of the report, read for tests."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """The elements of a page, each with the text right in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.elements:
            tag, attributes, text = self.elements[-1]
            self.elements[-1] = (tag, attributes, text + data)

    def texts(self, tag: str) -> list[str]:
        return [text for name, _, text in self.elements if name == tag]

    def lines(self) -> int:
        return sum(
            name == "path" and "line " in (attributes.get("class") or "") and "L" in
            (attributes.get("d") or "") for name, attributes, _ in self.elements
        )  # fmt: skip

    def data(self) -> Any:
        [text] = [t for name, a, t in self.elements if name == "script" and a.get("id") == "data"]
        return json.loads(text)


def plot(page: Page, title: str) -> Any:
    return next(each for each in page.data()["plots"] if each["title"] == title)
