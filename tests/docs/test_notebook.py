"""A real notebook, run by a real kernel: what Jupyter is given to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
CELLS = [
    "from cairn import Job, sinks\n"
    "from cairn.report.notebook import Plot, timeline_svg\n"
    "from tests.unit.plan.programs import process, source\n"
    "from tests.unit.report.test_notebook import epoch",
    "job = Job('spent')\nout = process(source(job, 'rows'), 'same')\nout",
    "out.sink_to(sinks.Noop(), uid='out')\njob",
    "Plot(timeline_svg('spent', [epoch(7)]))",
]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each cell shows for its last line, by type; {} if it shows nothing."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        # Its settings are nobody's: not those of who runs the tests.
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        client = nbclient.NotebookClient(
            book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
        )
        client.execute()
    return [dict(cell.outputs[-1]["data"]) if cell.outputs else {} for cell in book.cells]


def test_a_stream_and_a_job_are_shown_as_html_with_their_graph(shown: list[Any]) -> None:
    _, stream, job, _ = shown
    assert "stream same of job spent" in stream["text/html"] and "<svg" in stream["text/html"]
    assert "job spent" in job["text/html"] and "<svg" in job["text/html"]
    assert job["text/plain"].startswith("<job spent"), "without HTML, a line"


def test_a_plot_is_shown_as_a_picture(shown: list[Any]) -> None:
    *_, plot = shown
    assert "epoch 7" in plot["text/html"] and plot["image/svg+xml"].startswith("<svg")
