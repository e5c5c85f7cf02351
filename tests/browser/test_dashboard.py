"""The dashboard of a job that runs, in a real browser: watch it, ask it, change it, see it fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.driver.coordinator import compaction
from cairn.driver.serving import Serve
from cairn.errors import FunctionError
from cairn.web.server import serve
from cairn.web.site import Site
from tests.backends import backend_name
from tests.browser.payments import PAYMENT, build, payments
from tests.marks import for_soak
from tests.spark.support import Input

CONTROL = "a-token-for-control"
ROWS = 200


def spent(rows: list[tuple[Any, ...]], card: str) -> int:
    return sum(cents for each, _, cents, _ in rows if each == card)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [for_soak("heap"), "postgres", for_soak("redis")])
def test_a_live_job_is_watched_asked_and_changed(
    spark: Any,
    tmp_path: Path,
    open_page: Callable[..., Any],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")
    monkeypatch.setattr(compaction, "BASE_BYTES_MIN", 0)
    source = Input(tmp_path / "in", PAYMENT)
    job = build(spark, tmp_path)
    files = [payments(at, ROWS, cards=40) for at in range(4)]
    card = max({row[0] for row in files[0]}, key=lambda each: spent(files[0], each))
    run = job.start(
        checkpoint=str(tmp_path / "checkpoint"),
        trigger="50 milliseconds",
        parallelism=2,
        backend=backend_name(backend),
        serve=Serve(control_token=CONTROL, flight=False),
    )
    with run:
        source.add(*files[0])
        run.process_all_available()
        first = run.metrics().epoch
        page = open_page(run.url)
        page.locator("#status", has_text=re.compile("^(running|idle)$")).wait_for()
        page.locator(".age", has_text=f"epoch {first},").wait_for()
        for node in ("payments", "score", "turnover", "ledger", "alerts"):
            page.locator(".graph .node .name", has_text=re.compile(f"^{node}$")).wait_for()

        # An epoch arrives.
        source.add(*files[1])
        run.process_all_available()
        second = run.metrics().epoch
        page.locator(".age", has_text=f"epoch {second},").wait_for()

        # A key is looked up: the running job answers.
        page.goto(f"{run.url}/#/state?operator=score&state=spent")
        page.get_by_label("Key (card string)").fill(card)
        page.keyboard.press("Enter")
        page.get_by_text("answered by the running job").wait_for()
        total = spent(files[0] + files[1], card)
        assert page.locator(".answer .big").inner_text() == f"{total:,}"

        # The same in SQL, of the checkpoint.
        page.get_by_role("tab", name="SQL").click()
        query = f"""select value from "score.spent" where card = '{card}'"""
        page.get_by_label("Query", exact=False).fill(query)
        page.get_by_role("button", name="Run").click()
        page.get_by_role("cell", name=f"{total:,}").wait_for()

        _change(page, run)
        source.add(*files[2])
        run.process_all_available()
        assert run.parallelism == 3
        page.goto(f"{run.url}/#/groups?operator=score")
        page.locator(".shares li", has_text="subtask 2").first.wait_for()
        page.goto(f"{run.url}/#/history")
        page.get_by_role("cell", name=re.compile("friday$")).wait_for()

        # A row that the function raises on: the run fails, the page tells which.
        source.add(*payments(9, ROWS, cards=40, bad=1))
        with pytest.raises(FunctionError):
            run.process_all_available()
    page.close()
    # The server has ended with the run: what the page asked it meanwhile came to nothing.
    assert [said for said in page.complaints if "net::ERR" not in said] == []
    page.complaints.clear()
    with serve(Site(str(tmp_path / "checkpoint"), Serve(flight=False))) as served:
        page = open_page(served.url)
        page.goto(f"{served.url}/#/errors")
        page.locator("summary", has_text="ended the run").click()
        failure = page.locator(".failure").first.inner_text()
        page.close()  # Before its server is: it would complain.
    assert "score" in failure and "a payment of -" in failure and "card-" in failure
    assert "payments.py" in failure and "2 attempts" in failure


def _change(page: Any, run: Any) -> None:
    """A savepoint and another parallelism, by hand; a wrong token changes nothing."""
    page.get_by_role("link", name="Control").click()
    token = page.get_by_label("Control token", exact=False)
    for given, said in (("no-such-token-at-all", "token"), (CONTROL, "Savepoint of epoch")):
        token.fill(given)
        page.get_by_label("Name", exact=True).fill("friday")
        page.get_by_role("button", name="Take a savepoint").click()
        page.get_by_role("dialog").get_by_role("button", name="Take it").click()
        page.locator(".outcomes li").first.filter(has_text=said).wait_for()
    # The refusal of the first is on the browser's console too.
    assert [said for said in page.complaints if "401" not in said] == []
    page.complaints.clear()
    page.get_by_label("Subtasks").fill("3")
    page.get_by_role("button", name="Rescale").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert run.parallelism == 2
    page.get_by_role("button", name="Rescale").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Rescale").click()
    page.locator(".outcomes li").first.filter(has_text="Rescaling to 3 subtasks").wait_for()
