"""Several runs on one page: what is compared, and what is not."""

from __future__ import annotations

from pathlib import Path

from tests.report.folders import hundred_steps, make_run
from tests.report.pages import Page, plot
from trainer.engine.checkpoint.manifest import Manifest, write_manifest
from trainer.engine.report.page import write_page
from trainer.engine.report.runs import BITS


def test_losses_by_source_have_a_plot_and_a_column_each(tmp_path: Path) -> None:
    paths = []
    for name, loss in (("a", 1.0), ("b", 2.0)):
        rows = [row | {"loss/<b>books": loss} for row in hundred_steps()]
        paths.append(make_run(tmp_path / name, [row | {"total_loss": row["loss"]} for row in rows]))
    page = Page(write_page(paths))
    assert {one["run"]: one["y"][-1] for one in plot(page, "Loss: <b>books")["series"]} == {
        0: 1.0,
        1: 2.0,
    }
    assert not [title for title in page.texts("h3") if "regularisers" in title]
    assert "Validation: <b>books" in page.texts("th")
    assert "1.0000" in page.texts("strong")


def compared(tmp_path: Path, losses: dict[str, float], bits: dict[str, float]) -> Page:
    """Return a page about runs, each with a tokenizer of its own."""
    paths = []
    for name, loss in losses.items():
        rows = [
            row | {"loss": loss} | ({BITS: bits[name]} if name in bits else {})
            for row in hundred_steps()
        ]
        recipe = f'[run]\nsteps = 100\n[tokenizer]\nname = "hf"\npath = "{name}"\n'
        paths.append(make_run(tmp_path / name, rows, recipe))
    return Page(write_page(paths))


def test_runs_with_different_tokenizers_are_compared_by_bits_per_byte(tmp_path: Path) -> None:
    """Tokens of four bytes cost more each than single bytes do, and less for the same text."""
    page = compared(tmp_path, {"bytes": 1.5, "words": 3.0}, {"bytes": 2.2, "words": 1.1})
    best = page.texts("strong")
    assert best == ["1.1000", "1.1000"], "the newest and the best evaluation of words"
    assert "1.5000" in page.texts("td")
    assert any("bits per byte can" in text for text in page.texts("p"))
    assert [one["y"][-1] for one in plot(page, "Validation bits per byte")["series"]] == [2.2, 1.1]


def test_without_bits_per_byte_no_run_is_the_best(tmp_path: Path) -> None:
    page = compared(tmp_path, {"bytes": 1.5, "words": 3.0, "more": 2.0}, {"bytes": 2.2, "more": 1})
    assert page.texts("strong") == []
    (note,) = [text for text in page.texts("p") if "tokenizers differ" in text]
    assert note.endswith("the evaluations of words have no bits per byte.")


def test_checkpoints_say_whether_tokenizers_are_the_same(tmp_path: Path) -> None:
    """Two paths may hold one tokenizer, and one path two."""
    for place, names in enumerate((("same", "same"), ("one", "other"))):
        folder, paths = tmp_path / str(place), []
        for number, (name, loss) in enumerate(zip(names, (1.5, 3.0), strict=True)):
            rows = [row | {"loss": loss, BITS: 1 / loss} for row in hundred_steps()]
            recipe = f'[run]\nsteps = 100\n[tokenizer]\nname = "hf"\npath = "{place * number}"\n'
            paths.append(make_run(folder / str(number), rows, recipe))
            checkpoint = paths[-1] / "checkpoints" / "step-00000100"
            checkpoint.mkdir(parents=True)
            write_manifest(
                checkpoint, Manifest(step=100, tensors={}, files={}, saved_at="now", tokenizer=name)
            )
        best = Page(write_page(paths)).texts("strong")
        assert ("1.5000" in best) is (place == 0)
        assert "0.3333" in best
