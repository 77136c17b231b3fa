"""The notebook runs as it stands, in a kernel of Jupyter."""

import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.distributed import ROOT

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Return the code cells of the notebook, executed in an empty folder."""
    notebook = nbformat.read(ROOT / "docs/notebooks/quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    where = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_trains_plots_and_evaluates(executed):
    *_, plotted, evaluated = executed
    assert any("image/png" in output.get("data", {}) for output in plotted.outputs)
    streams = [output.text for output in evaluated.outputs if output.output_type == "stream"]
    text = "".join(streams)  # in as many pieces as it came in
    assert 0 < float(text.split()[0]) < 8, "a byte has 8 bits"


def test_progress_in_a_notebook_is_plain_lines(executed):
    outputs = executed[1].outputs
    assert {output.output_type for output in outputs} == {"stream"}
    text = "".join(output.text for output in outputs)
    assert re.findall(r"^step +(\d+)/60  loss ", text, re.MULTILINE) == [
        "1", *map(str, range(5, 61, 5)),
    ]  # fmt: skip
    assert "finished: 60 steps" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text), "no control characters"
