"""The notebooks run from top to bottom."""

from __future__ import annotations

import pathlib

import pytest

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["introduction", "sharding_and_plans"]


@pytest.mark.filterwarnings("ignore")  # Jupyter's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    reason = "nbclient and ipykernel are not installed (extra 'examples')"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    assert any(cell.get("outputs") for cell in notebook.cells)  # it is kept with its outputs
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
