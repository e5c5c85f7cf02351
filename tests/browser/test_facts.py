"""The dashboard shows the facts of a job: failures, rows put aside, edges, axes. Without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.driver.serving import Serve
from cairn.errors import FunctionError
from cairn.report.epoch import LetterSample, Measured, Timings
from cairn.storage.failures import Failures
from cairn.storage.notes import write_ending, write_graph
from cairn.storage.store import open_store
from cairn.web.server import serve
from cairn.web.site import Site
from tests.marks import for_soak
from tests.unit.report.reports import measured
from tests.unit.snapshots.checkpoints import UID, Checkpoint, value
from tests.unit.web.test_overview import GRAPH, job_graph

OpenPage = Callable[..., Any]

OVERLAPPING = """() => {
  const found = [];
  for (const svg of document.querySelectorAll(".chart svg")) {
    const frame = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text.tick")].map((each) => {
      const { left, right, top, bottom } = each.getBoundingClientRect();
      return { text: each.textContent, left, right, top: top + 1, bottom: bottom - 1 };
    });
    boxes.forEach((one, at) => {
      const isCut = one.left < frame.left - 1 || one.right > frame.right + 1;
      if (isCut) found.push(`${one.text} is cut off`);
      for (const two of boxes.slice(at + 1)) {
        const beside = one.right <= two.left || two.right <= one.left;
        const above = one.bottom <= two.top || two.bottom <= one.top;
        if (!beside && !above) found.push(`${one.text} lies over ${two.text}`);
      }
    });
  }
  return found;
}"""


@pytest.fixture
def made(tmp_path: Path) -> Checkpoint:
    return Checkpoint({"n": value("bigint")}, store=open_store(str(tmp_path / "c")))


@pytest.fixture
def url(made: Checkpoint) -> Iterator[str]:
    with serve(Site(made.store.url, Serve(flight=False))) as served:
        yield served.url


def commit(made: Checkpoint, **figures: Any) -> None:
    """An epoch that has measured this."""
    epoch = made.commit({"n": {1: 1}})
    made.log.append(
        lambda number: msgspec.structs.replace(
            epoch,
            number=number,
            parent=epoch.number,
            metrics=Measured(operators={UID: measured(**figures)}),
            timings=Timings(run_ms=120.0 + number),
            wall_ms=1_800_000_000_000 + 1000 * number,
        )
    )


@pytest.mark.parametrize("epochs", [for_soak(1), for_soak(2), 9])
def test_texts_under_and_beside_axes_never_overlap(
    made: Checkpoint, url: str, open_page: OpenPage, epochs: int
) -> None:
    for at in range(epochs):
        commit(made, rows_in=10**at, state_keys=10**at, state_entries=3 * 10**at)
    for width in (390, 760, 1440):
        page = open_page(url, width=width)
        for name in ("", "epochs", "charts", f"operators/{UID}"):
            page.goto(f"{url}/#/{name}")
            page.wait_for_selector(".chart text.tick")
            assert page.evaluate(OVERLAPPING) == [], (name, width)
        page.close()


@pytest.mark.parametrize(("width", "scheme"), [for_soak(1440, "light"), (390, "dark")])
def test_a_failed_job_opens_on_its_failure(
    made: Checkpoint, url: str, open_page: OpenPage, width: int, scheme: str
) -> None:
    error = FunctionError(
        "process() of operator 'count' raised ValueError: bad\n  at: job.py:12 in process",
        operator=UID, key="7", row="Row(k=7)",
    )  # fmt: skip
    failures = Failures(made.store, "shop")
    for attempt in range(1, 5):
        failures.note(error, 2, attempt)
    failures.note_end(error, 2)
    write_ending(made.store, made.term, "failed", error)
    page = open_page(url, width=width, scheme=scheme)
    assert page.locator("#status").inner_text() == "failed"
    text = page.locator(".now-failed").inner_text()
    for part in (
        "The job has failed",
        "process() of operator 'count' raised ValueError: bad",
        "Row(k=7)",
        "job.py:12 in process",
        "4 attempts at epoch 2",
        "fix the function and start the job again",
    ):
        assert part in text
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_rows_put_aside_are_shown_with_what_was_wrong(
    made: Checkpoint, url: str, open_page: OpenPage
) -> None:
    sample = [LetterSample("ValueError: bad\n<b>x</b>", "7", '{"k": 7}')]
    commit(made, rows_in=5, error_rows=2, error_sample=sample)
    page = open_page(f"{url}/")
    page.goto(f"{url}/#/errors")
    text = page.locator(".sample").inner_text()
    assert "ValueError: bad\n<b>x</b>" in text and '{"k": 7}' in text and "key 7" in text


def test_an_edge_is_as_thick_as_any_other(made: Checkpoint, url: str, open_page: OpenPage) -> None:
    edges = [
        {**GRAPH["edges"][0], "way": way, "by": []} for way in ("keyed", "spread", "broadcast")
    ]
    write_graph(made.store, 1, job_graph(edges=[*edges, GRAPH["edges"][1]]))
    page = open_page(url)
    page.wait_for_selector(".graph .link")
    widths = page.eval_on_selector_all(
        ".graph .link", "all => all.map((each) => getComputedStyle(each).strokeWidth)"
    )
    assert len(widths) == 4 and len(set(widths)) == 1
