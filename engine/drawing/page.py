"""A single HTML file that loads nothing from elsewhere. Torch-free."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any


def render_page(title: str, body: str, style: str = "", data: Any = None) -> str:
    """Return a page in the style of reports.

    The policy in its head lets only the page's own style and script run, both named by their
    hashes, and lets nothing be loaded.

    Args:
        title: plain text.
        body: HTML; what comes from files is escaped already.
        style: CSS rules besides those of every page.
        data: JSON for the script that draws plots; None: the page has no script.
    """
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text("utf-8") + style
    policy = f"default-src 'none'; style-src '{_hash(style)}'; "
    scripts = ""
    if data is not None:
        script = (folder / "page.js").read_text("utf-8")
        policy += f"script-src '{_hash(script)}'; "
        scripts = (
            f'<script type="application/json" id="data">{_json(data)}</script>\n'
            f"<script>{script}</script>\n"
        )
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        f"content=\"{policy}base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{body}\n{scripts}</body>\n</html>\n"
    )
    return page.encode(errors="replace").decode()  # names of files may hold what no text can


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _json(data: Any) -> str:
    """Return JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
