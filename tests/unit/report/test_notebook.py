"""What a notebook shows of jobs, streams and runs: whole, escaped, and of the newest epoch."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from typing import Any

import msgspec
import pytest

from cairn import Job, RestoreError, sinks
from cairn.report.epoch import EpochReport, Timings
from cairn.report.notebook import (
    PART_COLOURS,
    PART_MEANINGS,
    PLOT_EPOCHS,
    Plot,
    RunFacts,
    run_facts,
    run_html,
    timeline,
    timeline_svg,
    with_commits,
)
from tests.unit.plan.programs import process, source
from tests.unit.report.reports import TIMINGS
from tests.unit.report.reports import epoch_report as epoch

HOSTILE = "<script>alert('x')</script>&\"]]>"
SVG = "{http://www.w3.org/2000/svg}"


def run_of(*epochs: EpochReport, **other: Any) -> RunFacts:
    facts = RunFacts("fraud", "running", None, "/ckpt", with_commits(epochs, 5.0))
    return facts._replace(**other)


def parsed(html: str) -> ElementTree.Element:
    """It is well-formed: a browser has nothing to guess."""
    return ElementTree.fromstring(html)


def texts(html: str) -> list[str]:
    return [text.strip() for text in parsed(html).itertext() if text.strip()]


def test_a_run_shows_its_status_and_the_newest_epoch_first() -> None:
    html = run_html(run_of(epoch(42), epoch(41)))
    said = texts(html)
    assert said[:3] == ["fraud", "running", "epoch 42"]
    cells = [cell.text for cell in parsed(html).iter("td")]
    assert cells[:2] == ["42", "42,000"] and "41" in cells
    assert cells.index("42") < cells.index("41")


def test_a_run_without_an_epoch_says_so() -> None:
    html = run_html(run_of())
    assert "no epoch yet" in texts(html)
    assert not list(parsed(html).iter("table"))


def test_a_run_that_failed_shows_why() -> None:
    html = run_html(run_of(epoch(3), status="failed", why="FunctionError: operator 'a'\n  row: 1"))
    assert "FunctionError: operator 'a'\n  row: 1" in texts(html)


class Ended:
    """A run, as far as it is looked at."""

    name, status, paused, error = "fraud", "failed", None, ValueError("no room")


def test_of_very_many_epochs_no_more_are_read_than_are_shown() -> None:
    asked = itertools.count(10**6, -1)
    facts = run_facts(Ended(), "/ckpt", (epoch(number) for number in asked), 5.0)
    assert len(facts.epochs) == PLOT_EPOCHS and facts.why == "no room"
    assert next(asked) == 10**6 - PLOT_EPOCHS
    assert "epoch 1000000:" in timeline(facts).svg


def test_a_run_whose_checkpoint_is_gone_is_shown_all_the_same() -> None:
    def epochs() -> Any:
        yield epoch(9)
        raise RestoreError("there is no such record")

    facts = run_facts(Ended(), "/ckpt", epochs(), 0.0)
    assert "fraud" in texts(run_html(facts))


def test_watermark_and_records_in_loops_are_shown_where_there_are_any() -> None:
    (about,) = [t for t in texts(run_html(run_of(epoch(3, watermark_ms=0, in_flight=1200))))
                if "watermark" in t]  # fmt: skip
    assert "watermark 1970-01-01 00:00:00 UTC" in about and "1,200 records in loops" in about
    far = texts(run_html(run_of(epoch(3, watermark_ms=10**18))))
    assert any(f"watermark {10**18} ms" in text for text in far), "no date has that year"


@pytest.mark.parametrize("field", ["name", "status", "why", "checkpoint"])
def test_hostile_names_of_a_run_are_text(field: str) -> None:
    html = run_html(run_of(epoch(1), **{field: HOSTILE}))
    assert "<script" not in html
    assert any(HOSTILE in text for text in texts(html))


def test_hostile_names_of_a_job_are_text() -> None:
    job = Job("plain")
    stream = source(job, "rows", f"k long, v long, `{HOSTILE.replace('`', '')}` string")
    out = process(stream, "same", schema="k long, v long")
    out.sink_to(sinks.Noop(), uid="out")
    for shown in (job, stream, out):
        html = shown._repr_html_()
        assert "<script" not in html
        parsed(html)
    assert HOSTILE in texts(stream._repr_html_())
    plot = timeline_svg(HOSTILE, [epoch(1)])
    assert "<script" not in plot
    parsed(plot)


def test_a_stream_shows_its_columns_and_the_graph_it_is_part_of() -> None:
    job = Job("plain")
    out = process(source(job, "rows"), "same", schema="k long, v long")
    said = texts(out._repr_html_())
    assert said[0] == "stream same of job plain"
    assert said[1:7] == ["column", "type", "k", "bigint", "v", "bigint"]
    assert any(node.tag == f"{SVG}svg" for node in parsed(out._repr_html_()).iter())


def test_a_job_that_is_not_whole_yet_says_what_is_missing() -> None:
    job = Job("new")
    assert any("has no source" in text for text in texts(job._repr_html_()))
    assert any("does nothing" in text for text in texts(source(job, "rows")._repr_html_()))


def test_the_parts_of_an_epoch_add_up_to_its_time() -> None:
    parts = dict(epoch(1).with_commit(30.0).parts.items())
    assert set(parts) == set(PART_COLOURS) == set(PART_MEANINGS)
    assert parts["process"] == 40 and parts["alignment"] == 20 and parts["commit"] == 30
    assert sum(parts.values()) == pytest.approx(130)


def test_the_time_of_a_commit_is_noted_by_the_epoch_after_it() -> None:
    newest = epoch(2, msgspec.structs.replace(TIMINGS, last_commit_ms=77.0))
    last, first = with_commits([newest, epoch(1)], 3.0)
    assert (first.epoch, last.epoch) == (1, 2)
    assert (first.parts.commit, last.parts.commit) == (77.0, 3.0)


def test_an_epoch_of_an_older_version_is_drawn_with_what_it_has() -> None:
    old = epoch(1, Timings(run_ms=5.0))
    parsed(timeline_svg("old", [old]))
    assert dict(old.parts.items())["spark"] == 5.0


def test_the_timeline_has_a_bar_for_each_of_the_last_epochs_and_stays_inside() -> None:
    epochs = [epoch(number) for number in range(200, 0, -1)]
    root = parsed(timeline_svg("fraud", epochs))
    bars = [group for group in root.iter(f"{SVG}g")
            if (group.findtext(f"{SVG}title") or "").startswith("epoch ")]  # fmt: skip
    assert len(bars) == PLOT_EPOCHS
    assert "epoch 200:" in (bars[-1].findtext(f"{SVG}title") or "")
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert x >= 0 and y >= 0
        assert x + float(rect.get("width", 0)) <= 720
        assert y + float(rect.get("height", 0)) <= 260


@pytest.mark.parametrize("ms", [0.0, 0.2, 1.0, 7.0, 99.0, 101.0, 4_000.0, 3_600_000.0])
def test_the_timeline_fits_epochs_of_any_length(ms: float) -> None:
    root = parsed(timeline_svg("fraud", [epoch(1, Timings(run_ms=ms))]))
    rects = list(root.iter(f"{SVG}rect"))
    assert rects and min(float(rect.get("y", 0)) for rect in rects) >= 0


def test_an_epoch_that_did_not_go_smoothly_is_marked() -> None:
    rough = epoch(1, restored=2, attempts=3)
    plot = timeline_svg("fraud", [rough])
    assert "3 attempts, 2 restored" in plot and ">!<" in plot
    assert ">!<" not in timeline_svg("fraud", [epoch(1)])


def test_a_plot_is_shown_as_html_and_as_svg() -> None:
    plot = Plot(timeline_svg("fraud", []))
    assert plot._repr_svg_() == plot.svg and plot.svg in plot._repr_html_()
    assert "no epoch yet" in texts(plot._repr_html_())
