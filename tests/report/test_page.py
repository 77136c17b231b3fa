"""What the report says, with and without its script, and what it does with odd files."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from pathlib import Path

import pytest

from tests.report.folders import eval_row, hundred_steps, make_run, train_row
from tests.report.pages import Page, plot
from trainer.engine.drawing.elements import format_short, log_ticks, ticks, visible
from trainer.engine.report.page import write_page
from trainer.engine.report.plots import plots_of, thin
from trainer.engine.report.runs import differences, names_of, read_run


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return make_run(tmp_path / "one", hundred_steps(), state={"outcome": "finished"})


def test_every_number_of_a_run_has_a_plot_that_needs_no_script(one: Path) -> None:
    page = Page(write_page([one]))
    assert page.texts("h3") == [
        "Loss", "Validation loss", "Validation perplexity", "Learning rate", "Gradient norm",
        "Throughput ", "Model FLOP/s utilization ", "Time per step ", "Wait for data per step ",
        "Peak memory ",
    ]  # fmt: skip
    assert page.lines() == 11, "the plot of the loss has a line for training and one for validation"
    assert plot(page, "Peak memory")["series"][0]["y"] == [1] * 10
    perplexity = plot(page, "Validation perplexity")["series"][0]
    assert perplexity["x"][0] == [20, 40, 60, 80, 100]
    assert perplexity["y"][-1] == pytest.approx(math.exp(5 / 3 + 0.1), rel=1e-5)
    assert perplexity["x"][2] == [10, 20, 30, 40, 50], "seconds of training: 0.5 a step"


def test_layers_and_classes_share_a_plot_and_metrics_have_their_own(tmp_path: Path) -> None:
    rows = hundred_steps()
    for row in rows:
        for layer in range(3):
            row |= {f"grad_norm/layers.{layer}": 1.0 + layer} if row["kind"] == "train" else {}
        if row["kind"] == "eval":
            row |= {"accuracy": 0.5, "f1_score/cat": 0.25, "f1_score/dog": 0.75}
    runs = [make_run(tmp_path / name, rows) for name in "ab"]
    page = Page(write_page(runs[:1]))
    series = plot(page, "Gradient norm by layer")["series"]
    assert [one["label"] for one in series] == ["layers.0", "layers.1", "layers.2"]
    assert [one["colour"] for one in series] == [0, 1, 2]
    assert plot(page, "Validation accuracy")["series"][0]["y"][-1] == 0.5
    classes = plot(page, "Validation f1 score by part")["series"]
    assert {one["label"]: one["y"][0] for one in classes} == {"cat": 0.25, "dog": 0.75}
    further = [
        {"kind": "eval", "step": 20, "split": "books", "loss": 2.0, "accuracy": 0.5},
        {"kind": "eval", "step": 40, "split": "books", "loss": 1.0, "accuracy": 0.25},
    ]
    page = Page(write_page([make_run(tmp_path / "c", rows + further)]))
    assert plot(page, "Accuracy of books")["series"][0]["y"] == [0.5, 0.25]
    assert plot(page, "Loss of books")["series"][0]["y"] == [2, 1]
    both = plot(Page(write_page(runs)), "Gradient norm by layer")["series"]
    assert [one["colour"] for one in both] == [0, 0, 0, 1, 1, 1]


def test_many_layers_do_not_push_out_the_numbers_of_the_run(tmp_path: Path) -> None:
    layers = {f"grad_norm/layers.{layer}": 1.0 for layer in range(700)}
    rows = [{"kind": "train", **layers, **row} for row in hundred_steps() if row["kind"] == "train"]
    titles = Page(write_page([make_run(tmp_path / "r", rows)])).texts("h3")
    assert {"Loss", "Throughput ", "Peak memory ", "Gradient norm by layer"} <= {*titles}


def test_a_run_without_evaluation_has_no_plots_of_it(tmp_path: Path) -> None:
    rows = [row for row in hundred_steps() if row["kind"] == "train"]
    titles = Page(write_page([make_run(tmp_path / "r", rows)])).texts("h3")
    assert "Loss" in titles
    assert not [title for title in titles if "Validation" in title]


def test_compared_runs_share_each_plot_and_only_what_differs_of_recipes_is_format_short(
    tmp_path: Path,
) -> None:
    recipe = '[run]\nsteps = 100\nname = "{}"\n[optimizer]\nlr = {}\nbetas = [0.9, 0.95]\n'
    paths = [
        make_run(tmp_path / name, hundred_steps(factor), recipe.format(name, lr))
        for name, factor, lr in (("a", 1.0, 1e-3), ("b", 0.5, 3e-3), ("c", 2.0, 1e-3))
    ]
    page = Page(write_page(paths))
    assert [one["run"] for one in plot(page, "Gradient norm")["series"]] == [0, 1, 2]
    assert page.data()["runs"] == ["a", "b", "c"]
    codes = page.texts("code")
    assert codes == ["optimizer.lr", "0.001", "0.003", "0.001"]
    best = page.texts("strong")
    assert "0.8333" in best, "half of 5/3: the loss of b, the best of the three"
    assert "1.6667" not in best


def test_a_run_without_its_recipe_does_not_make_every_key_differ(tmp_path: Path) -> None:
    recipes = {
        "a": "[run]\nsteps = 1\n[optimizer]\nlr = 1.0",
        "b": "[optimizer]\nlr = 1.0",
        "c": "",
    }
    runs = [make_run(tmp_path / name, hundred_steps(), text) for name, text in recipes.items()]
    found = differences([read_run(run, run.name) for run in runs])
    assert found == [("run.steps", [1, None, None])]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "z"]
    assert names_of(paths) == [str(paths[0]), str(paths[1]), "z"]


HOSTILE = '</script><script>document.title="hit"</script><img src=x onerror=alert(1)>"\'&'


def test_names_keys_and_values_from_files_are_only_text(tmp_path: Path) -> None:
    text = HOSTILE.replace("/", "")  # a folder's name has no slash
    rows = [{**train_row(step), HOSTILE: 1.0 * step, "kind": kind}
            for step in (1, 2, 3) for kind in ("train", HOSTILE)]  # fmt: skip
    recipe = f"[run]\nsteps = 3\n{json.dumps(HOSTILE)} = {json.dumps(HOSTILE)}\n"
    path = make_run(tmp_path / text[:80], rows, recipe, {"outcome": "failed", "reason": HOSTILE})
    for paths in ([path], [path, make_run(tmp_path / "b", rows)]):
        html = write_page(paths)
        page = Page(html)
        assert page.texts("img") == []
        scripts = [attributes for name, attributes, _ in page.elements if name == "script"]
        assert scripts == [{"type": "application/json", "id": "data"}, {}]
        handlers = [
            key for _, attributes, _ in page.elements for key in attributes if key.startswith("on")
        ]
        assert handlers == []
        assert page.data()["runs"][0] == text[:80]
        assert any(each["title"] == f"train: {HOSTILE}" for each in page.data()["plots"])


def test_the_page_may_run_its_own_style_and_script_and_load_nothing(one: Path) -> None:
    html = write_page([one])
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    for element, rule in (("style", "style-src"), ("script", "script-src")):
        [text] = re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    page = Page(html)
    for _, attributes, _ in page.elements:
        assert not {"style", "src", "href", "onclick"} & {*attributes}
    assert not re.search(r"@import|url\((?!#)", html.replace("url(#${", "url(#"))


def test_secrets_of_recipe_and_environment_stay_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "canary-from-the-environment")
    recipe = (
        '[run]\nsteps = 1\n[a]\napi_key = "canary-key"\nurl = "https://me:canary-word@host/x"\n'
        'path = "s3://b/x?X-Amz-Signature=canary-signed&y=1"\n'
        'b = "in canary-from-the-environment"\ntokenizer = "kept"\n'
    )
    html = write_page([make_run(tmp_path / "r", hundred_steps(), recipe)])
    assert "canary" not in html
    assert "kept" in html
    assert "y=1" in html


def test_numbers_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    rows = [train_row(step, loss=loss) for step, loss in
            enumerate([3.0, math.nan, 2.0, math.inf, -math.inf, 1.0], 1)]  # fmt: skip
    html = write_page([make_run(tmp_path / "r", rows)])
    [series] = plot(Page(html), "Loss")["series"]
    assert series["y"] == [3, None, 2, None, None, 1]
    [path] = re.findall(r'<path class="line c0" d="(M[^"]+)"', html)[:1]
    assert path.count("M") == 3, "the line is broken where nothing can be drawn"
    assert "NaN" not in html.split('id="data"')[1].split("</script>")[0]


def test_odd_lines_of_a_live_file_do_no_harm(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", hundred_steps())
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(
            b'[1, 2]\n{"kind": "train", "step": 110, "loss": "high", "lr": true, "x": null}\n'
        )
        file.write(b'\xff\xfe\n{"kind": ["x"], "step": 3}\n{"kind": "train", "step": -4}\n')
        file.write(b'{"kind": "train", "step": 120, "tokens": 1' + b"0" * 400 + b"}\n")
        file.write(b'{"kind": "train", "step": 130, "loss": 1.0')
    page = Page(write_page([path]))
    [series, _] = plot(page, "Loss")["series"]
    assert series["x"][0] == list(range(10, 101, 10))


def test_a_step_that_is_there_twice_counts_once_and_order_does_not_matter(tmp_path: Path) -> None:
    rows = [train_row(20, loss=9.0), train_row(10, loss=3.0), train_row(20, loss=2.0)]
    [series] = plot(Page(write_page([make_run(tmp_path / "r", rows)])), "Loss")["series"]
    assert (series["x"][0], series["y"]) == ([10, 20], [3, 2])


def test_a_run_of_no_rows_has_a_page(tmp_path: Path) -> None:
    html = write_page([make_run(tmp_path / "r", [], recipe="not TOML [")])
    assert "No rows in metrics.jsonl yet." in html


def test_the_shares_of_time_add_up(tmp_path: Path) -> None:
    rows = [row | {"time": 1.7e9 + 0.8 * row["step"]} for row in hundred_steps()]
    run = read_run(make_run(tmp_path / "r", rows), "r")
    busy, waiting, other = run.seconds()
    assert (busy, waiting) == pytest.approx((50, 10))
    assert other == pytest.approx(0.8 * 90 + 0.5 * 10 - 50)


def test_thinned_points_keep_every_peak_the_ends_and_the_mean() -> None:
    values = [math.sin(n / 500) for n in range(100_000)]
    values[77_777], values[5], values[31_000] = 40.0, -40.0, math.nan
    kept, means = thin(values, 1000)
    assert len(kept) == len(means) <= 1001
    assert kept == sorted(set(kept))
    assert {5, 31_000, 77_777} <= {*kept}
    drawn = [values[index] for index in kept]
    for start in range(0, 100_000, 1000):
        window = [v for v in values[start : start + 1000] if math.isfinite(v)]
        near = [v for i, v in zip(kept, drawn, strict=True) if start - 200 <= i < start + 1200]
        assert min(near) <= min(window)
        assert max(near) >= max(window) or not math.isfinite(max(near))
    position = kept.index(77_777)
    assert means[position] == pytest.approx((sum(values[77_600:77_800])) / 200, rel=1e-9)
    assert thin([1.0, 2.0], 1000) == ([0, 1], [])


@pytest.mark.matrix
def test_a_hundred_thousand_rows_make_a_small_page_soon(tmp_path: Path) -> None:
    rows = [train_row(step) for step in range(1, 100_001)]
    path = make_run(
        tmp_path / "long", rows + [eval_row(step, 1.0) for step in range(500, 10**5, 500)]
    )
    start = time.process_time()
    html = write_page([path])
    assert time.process_time() - start < 4, "2 s on an idle core"
    assert len(html) < 3e6
    assert len(plots_of([read_run(path, "x")])[0][1][0].y) <= 1201


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.9, 1.1, [0.9, 0.95, 1.0, 1.05, 1.1]), (1, 1, [])],
)
def test_ticks_are_round_numbers_in_the_range(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_ticks_of_a_logarithmic_scale_are_round_too() -> None:
    assert [10**tick for tick in log_ticks(0.1, 2.2)] == pytest.approx([2, 5, 10, 20, 50, 100])
    assert [10**tick for tick in log_ticks(-3, 3)] == pytest.approx(
        [1e-3, 1e-2, 0.1, 1, 10, 100, 1000]
    )


def test_numbers_are_shown_shortly() -> None:
    values = [0, 1.25, 3e-4, 25_000, 1_500_000, 1e20, -0.5, 0.00012345]
    assert [format_short(value) for value in values] == [
        "0", "1.25", "3e-4", "25k", "1.5M", "1e20", "-0.5", "1.23e-4"
    ]  # fmt: skip


def test_a_few_peaks_do_not_flatten_everything_else() -> None:
    usual = [1 + n / 1000 for n in range(1000)]
    assert visible([*usual, 1e9])[1] < 3
    assert visible(usual) == (1, 1.999)


def test_a_profile_is_shown_and_a_damaged_one_is_not(one: Path) -> None:
    folder = one / "profiles"
    folder.mkdir()
    summary = {
        "step_seconds": 0.2,
        "phase_seconds": {"forward": 0.05, "<b>": 0.1, "odd": "x"},
        "operators": [{"name": "aten::mm", "seconds": 0.04}],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    html = write_page([one])
    page = Page(html)
    assert "Profile of a step" in page.texts("h2")
    assert '50 ms <span class="quiet">25.0%</span>' in html
    assert "aten::mm" in page.texts("code")
    assert page.texts("b") == []
    for text in ("{", "[]", '{"step_seconds": 0}', json.dumps(summary | {"operators": 3})):
        (folder / "summary.json").write_text(text)
        assert "Profile of a step" not in Page(write_page([one])).texts("h2")
