"""The dashboard of a job whose state is in a database, in a real browser, without Spark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.backends.redis import backend as redis_backend
from cairn.driver.serving import Serve
from cairn.storage.log import Log
from cairn.storage.store import open_store
from cairn.web.server import serve
from cairn.web.site import Site
from tests.backends import backend_name
from tests.marks import for_soak
from tests.simulation.world import Driver, World

OpenPage = Callable[..., Any]


@pytest.fixture(params=["postgres", for_soak("redis")])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Five epochs, with a base after each."""
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")
    monkeypatch.setattr(redis_backend, "APPLY_EPOCHS", 1)
    made = World(7, tmp_path, backend=backend_name(request.param))
    # SQL runs in a process of its own, which must find the checkpoint.
    made.store = open_store(str(tmp_path / "checkpoint"))
    driver = Driver(made, parallelism=2, retained_epochs=10)
    driver.start()
    for _ in range(5):
        driver.run_batch(9)
    return made


@pytest.fixture
def url(world: World) -> Iterator[str]:
    with serve(Site(world.store.url, Serve(flight=False))) as served:
        yield served.url


def test_pages_of_state_groups_and_epochs_show_what_the_database_has(
    world: World, url: str, open_page: OpenPage
) -> None:
    new, *_ = Log(world.store).lineage()
    counts = {
        account: held["count"]
        for account, held in world.model(world.committed_rows()).state()["ledger"].items()
        if "count" in held
    }
    account = max(counts, key=lambda each: counts[each])
    page = open_page(url)
    page.goto(f"{url}/#/state?operator=ledger&state=count")
    page.get_by_label("Key (account bigint)").fill(str(account))
    page.keyboard.press("Enter")
    page.get_by_text(f"as of epoch {new.number}").wait_for()
    assert page.locator(".answer .big").inner_text() == str(counts[account])

    page.get_by_role("tab", name="Browse").click()
    page.get_by_text("page 1").wait_for()
    assert page.locator(".answer tbody tr").count() == len(counts)

    page.get_by_role("tab", name="SQL").click()
    query = 'select 1000000 * sum(value)::bigint as millions from "ledger.count"'
    page.get_by_label("Query", exact=False).fill(query)
    page.keyboard.press("Control+Enter")
    page.get_by_role("cell", name=f"{sum(counts.values()) * 1_000_000:,}").wait_for()

    page.get_by_role("tab", name="Diff").click()
    page.get_by_role("button", name="Compare").click()
    page.get_by_text(re.compile(r"\d+ added, \d+ changed, \d+ removed")).wait_for()

    page.goto(f"{url}/#/groups?operator=ledger")
    page.locator(".shares li", has_text="subtask 1").first.wait_for()
    page.get_by_text("rows in files, from their indexes").wait_for()
    page.goto(f"{url}/#/epochs/{new.number}")
    page.get_by_role("heading", name=f"Epoch {new.number}").wait_for()
    page.close()  # Before its server: it would complain that nobody answers.
