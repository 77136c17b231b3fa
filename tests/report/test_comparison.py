"""Several runs on one page: what is compared, and what is not."""

from __future__ import annotations

from pathlib import Path

from tests.report.folders import hundred_steps, make_run
from tests.report.pages import Page, plot
from trainer.engine.report.page import write_page


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
