"""The report in a real browser: drawn, in both schemes, without an error."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from tests.report.folders import hundred_steps, make_run, train_row
from trainer.engine.report.page import write_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip
HOSTILE = '<script>document.title="hit"</script><img src=x onerror=alert(1)>'


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        reason = "no Chromium on this machine"
        if os.environ.get("TRAINER_REQUIRE_CHROMIUM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def visit(page: Path, profile: Path, *options: str) -> str:
    """Open a page; return what the browser prints, and fail on any message of its console."""
    done = subprocess.run(
        [browser(), *QUIET, f"--user-data-dir={profile}", *options, page.as_uri()],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


def pixels(png: Path) -> set[bytes]:
    """Return the colours of a picture of 8-bit RGB or RGBA whose rows are not filtered alike."""
    data = png.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (depth, kind in (2, 6)) == (8, True)
    size = 3 if kind == 2 else 4
    packed, place = b"", 8
    while place < len(data):
        length, name = struct.unpack(">I4s", data[place : place + 8])
        packed += data[place + 8 : place + 8 + length] if name == b"IDAT" else b""
        place += length + 12
    raw, stride = zlib.decompress(packed), width * size
    before, colours = bytearray(stride), set()
    for row in range(height):
        start = row * (stride + 1)
        line = unfilter(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, size)
        colours |= {bytes(line[x : x + 3]) for x in range(0, stride, size)}
        before = line
    return colours


def unfilter(kind: int, line: bytearray, before: bytearray, size: int) -> bytearray:
    """Undo a row's filter (PNG specification, section 9)."""
    for x in range(len(line) if kind else 0):
        left = line[x - size] if x >= size else 0
        corner = before[x - size] if x >= size else 0
        up = before[x]
        guess = min((left, up, corner), key=lambda v: abs(left + up - corner - v))
        line[x] = (line[x] + (0, left, up, (left + up) // 2, guess)[kind]) % 256
    return line


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    odd = [{**train_row(step), HOSTILE: 1.0, "loss": float("nan")} for step in (5, 15)]
    runs = [
        make_run(folder / name.replace("/", ""), rows)
        for name, rows in (("a", hundred_steps()), ("b", hundred_steps(2.0)), (HOSTILE, odd))
    ]
    path = folder / "report.html"
    path.write_text(write_page(runs), "utf-8")
    return path


def test_every_plot_is_drawn_by_the_script_without_an_error(page: Path, tmp_path: Path) -> None:
    dom = visit(page, tmp_path, "--dump-dom")
    root = re.search(r"<html[^>]*>", dom)
    assert root is not None
    assert 'data-errors="0"' in root[0]
    drawn = re.search(r'data-drawn="(\d+)"', root[0])
    assert drawn is not None
    # 10 plots of a and b, twice in that of the loss; 8 of the third run and 1 of its own key.
    assert int(drawn[1]) == 11 * 2 + 8 + 1
    assert len(re.findall(r"<clipPath", dom)) == 11
    assert "<title>3 runs compared</title>" in dom, "no text from a file became a script"


@pytest.mark.matrix
def test_a_screenshot_shows_lines_in_the_runs_colours(page: Path, tmp_path: Path) -> None:
    light, dark = tmp_path / "light.png", tmp_path / "dark.png"
    visit(page, tmp_path / "p", f"--screenshot={light}", "--window-size=700,700")
    assert {bytes.fromhex("0072b2"), bytes.fromhex("d55e00"), b"\xff\xff\xff"} <= pixels(light)
    other = page.with_name("dark.html")
    text = page.read_text("utf-8").replace('<html lang="en">', '<html data-theme="dark">')
    other.write_text(text, "utf-8")
    visit(other, tmp_path / "p", f"--screenshot={dark}", "--window-size=700,700")
    assert {bytes.fromhex("56b4e9"), bytes.fromhex("ff8a3d")} <= pixels(dark)


DRIVE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const report = [], note = (name) => report.push(name + ":" +
    document.querySelector(".plot > svg path.line").getAttribute("d").length + "/" +
    document.querySelectorAll(".plot > svg path.line").length);
  const fire = (node, name, more) => node.dispatchEvent(new (name.startsWith("pointer") ?
    PointerEvent : Event)(name, {bubbles: true, pointerId: 1, ...more}));
  const svg = document.querySelector(".plot > svg"), box = svg.getBoundingClientRect();
  svg.setPointerCapture = () => {};
  note("start");
  const smooth = document.getElementById("smooth");
  smooth.value = "0.9"; fire(smooth, "input"); note("smooth");
  smooth.value = "0"; fire(smooth, "input");
  const tokens = document.querySelector("input[name=axis][value='1']");
  tokens.checked = true; fire(tokens, "change");
  report.push("tokens:" + [...svg.querySelectorAll(".mid")].map((t) => t.textContent).pop());
  const log = document.querySelector(".log"); log.checked = true; fire(log, "change");
  const labels = [...svg.querySelectorAll(".end")];
  report.push("log:" + labels.map((t) => t.textContent + "@" + t.getAttribute("y")).join(","));
  const width = box.width - 72;
  const at = (share) => ({clientX: box.left + 58 + share * width, clientY: box.top + 90});
  fire(svg, "pointermove", at(0.5));
  report.push("tip:" + document.querySelectorAll(".tip:not([hidden]) tr").length);
  fire(svg, "pointerdown", at(0.5)); fire(svg, "pointermove", at(0.8));
  fire(svg, "pointerup", at(0.8));
  report.push("zoom:" + [...svg.querySelectorAll(".mid")].map((t) => t.textContent).join(","));
  report.push("reset:" + !document.getElementById("reset").disabled);
  const run = document.querySelector("[data-run='0']"); run.checked = false; fire(run, "change");
  report.push("left:" + document.querySelectorAll(".plot > svg path.line").length);
  const marker = document.createElement("pre"); marker.id = "driven";
  marker.textContent = report.join(";"); document.body.append(marker);
}, 50));
</script></body>
"""


def test_smoothing_axes_scales_readout_zoom_and_legend_work(page: Path, tmp_path: Path) -> None:
    driven = page.with_name("driven.html")
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text("utf-8"))
    driven.write_text(text.replace("</body>", DRIVE), "utf-8")
    dom = visit(driven, tmp_path, "--dump-dom", "--virtual-time-budget=2000")
    found = re.search(r'<pre id="driven">([^<]*)</pre>', dom)
    assert found is not None
    facts = dict(each.split(":", 1) for each in found[1].split(";"))
    lines = int(facts["start"].split("/")[1])
    noisy = lines - 2 * 3
    assert int(facts["smooth"].split("/")[1]) == lines + noisy, "beside the raw lines of steps"
    assert facts["tokens"] == "50k"
    marks = [mark.split("@") for mark in facts["log"].split(",")]
    assert [label for label, _ in marks] == ["2", "4", "6", "8"]
    heights = [float(height) for _, height in marks]
    doubled = heights[0] - heights[1], heights[1] - heights[3]
    assert doubled[0] == pytest.approx(doubled[1], abs=0.5), "2 to 4 is as far as 4 to 8"
    assert int(facts["tip"]) == 5, "two lines of a and b, one of the third"
    first, *_, last = (float(word.rstrip("k")) for word in facts["zoom"].split(","))
    assert 26 <= first < last <= 43, "the dragged part of 2.56k to 51.2k tokens"
    assert facts["reset"] == "true"
    assert int(facts["left"]) == lines - 11
    root = re.search(r"<html[^>]*>", dom)
    assert root is not None
    assert 'data-errors="0"' in root[0]


@pytest.mark.matrix
def test_without_its_script_the_plots_are_there(page: Path, tmp_path: Path) -> None:
    still = page.with_name("still.html")
    text = page.read_text("utf-8")
    still.write_text(text[: text.rindex("<script>")], "utf-8")
    shot = tmp_path / "still.png"
    visit(still, tmp_path / "p", f"--screenshot={shot}", "--window-size=1400,900")
    assert {bytes.fromhex("0072b2"), bytes.fromhex("d55e00")} <= pixels(shot)
