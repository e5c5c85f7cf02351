"""The dashboard of a checkpoint in a real browser, without Spark: every page, hostile content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.driver.serving import Serve
from cairn.errors import FunctionError
from cairn.storage.failures import Failures
from cairn.storage.notes import SavepointNote, write_graph, write_savepoint_note
from cairn.storage.store import open_store
from cairn.web.server import serve
from cairn.web.site import Site
from tests.marks import for_soak
from tests.unit.snapshots.checkpoints import UID, Checkpoint, mapped, value
from tests.unit.web.test_overview import job_graph

TOKEN = "a-token-for-reading"
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
PAGES = ("", "epochs", "epochs/3", "charts", "groups", "state", "history", "errors", "control")

OpenPage = Callable[..., Any]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Keys, values, a failure and a savepoint whose texts are markup."""
    made = Checkpoint(
        {"n": value("bigint"), "seen": mapped("string", "string")},
        {"k": "string"},
        store=open_store(str(tmp_path / "ckpt")),
    )
    made.commit({"n": {f"key-{at}": at for at in range(300)} | {HOSTILE: 7}})
    made.commit({"n": {"key-1": 1001}, "seen": {HOSTILE: {HOSTILE: HOSTILE}}})
    write_graph(made.store, 1, job_graph(job=HOSTILE))
    failures = Failures(made.store, "shop")
    failures.note_end(FunctionError(HOSTILE, operator=UID, key=HOSTILE, row=HOSTILE), 4)
    write_savepoint_note(
        made.store, SavepointNote(id="s", url=HOSTILE, epoch=3, created_ms=1, bytes=1)
    )
    return made


@pytest.fixture
def url(checkpoint: Checkpoint) -> Iterator[str]:
    with serve(Site(checkpoint.store.url, Serve(flight=False))) as served:
        yield served.url


@pytest.mark.parametrize("width", [390, for_soak(1440)])
def test_every_page_fits_its_window_and_runs_nothing_of_what_it_shows(
    url: str, open_page: OpenPage, width: int
) -> None:
    page = open_page(url, width=width, scheme="dark" if width == 390 else "light")
    for name in PAGES:
        page.goto(f"{url}/#/{name}")
        page.wait_for_selector("h1")
        page.wait_for_load_state("networkidle" if name == "errors" else "load")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate("window.hacked") is None, name
    page.goto(f"{url}/#/errors")
    page.locator("summary").first.click()
    assert HOSTILE in page.locator(".failure").first.inner_text()
    page.goto(f"{url}/#/history")
    page.get_by_role("cell", name=HOSTILE).wait_for()
    assert page.locator("main img, main script").count() == 0


def test_a_hostile_key_is_looked_up_and_shown_as_text(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.goto(f"{url}/#/state?operator={UID}&state=seen")
    page.get_by_label("Key (k string)").fill(HOSTILE)
    page.get_by_role("button", name="Look up", exact=True).click()
    page.get_by_text("as of epoch 3").wait_for()
    assert page.locator(".answer td").inner_text() == HOSTILE
    assert page.evaluate("window.hacked") is None


def test_a_key_without_state_says_so(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.goto(f"{url}/#/state?operator={UID}&state=n")
    page.get_by_label("Key (k string)").fill("nobody")
    page.keyboard.press("Enter")
    page.get_by_text("No state for this key.").wait_for()


def test_a_key_of_several_columns_is_looked_up_to_its_last_digit(
    tmp_path: Path, open_page: OpenPage
) -> None:
    large = 2**53 + 1
    made = Checkpoint(
        {"n": value("bigint")},
        {"k": "string", "id": "bigint"},
        store=open_store(str(tmp_path / "two")),
    )
    made.commit({"n": {("a", large): 7, ("a", large - 1): 8, ("12345678901234567", 3): 9}})
    with serve(Site(made.store.url, Serve(flight=False))) as served:
        page = open_page(served.url)
        page.goto(f"{served.url}/#/state?operator={UID}&state=n")
        asked = page.get_by_label("Key (k string, id bigint)")
        for text, key, found in (
            (f'["a", {large}]', f"a, {large}", "7"),
            (f'["a", {large - 1}]', f"a, {large - 1}", "8"),
            ('["12345678901234567", 3]', "12345678901234567, 3", "9"),
        ):
            asked.fill(text)
            page.keyboard.press("Enter")
            page.locator(".answer code", has_text=re.compile(f"^{key}$")).wait_for()
            assert page.locator(".answer .big").inner_text() == found
        page.close()  # Before its server: it would complain that nobody answers.


def test_a_page_of_a_retired_epoch_leads_back_to_the_start(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.goto(f"{url}/#/state?operator={UID}&state=n&way=browse")
    page.get_by_text("page 1").wait_for()
    gone = {"error": {"code": "gone", "message": "epoch 3 is retired", "next": "begin again"}}
    page.route("**/api/state/**after=**", lambda route: route.fulfill(status=410, json=gone))
    page.get_by_role("button", name="Next").click()
    page.get_by_text("epoch 3 is retired").wait_for()
    page.get_by_role("button", name="From the start").click()
    page.get_by_text("page 1").wait_for()
    assert all("410" in said for said in page.complaints)
    page.complaints.clear()


def test_only_epochs_that_are_kept_are_offered_to_compare(url: str, open_page: OpenPage) -> None:
    page = open_page(url)

    def all_but_one_retired(route: Any) -> None:
        route.fulfill(json={**route.fetch().json(), "oldest_kept": 3})

    page.route("**/api/epochs?**", all_but_one_retired)
    page.goto(f"{url}/#/state?operator={UID}&state=n&way=diff")
    page.reload()
    page.get_by_text("Only one epoch is kept").wait_for()
    page.unroute_all(behavior="ignoreErrors")  # One may still be on its way.


def test_states_are_paged_through_and_asked_in_sql_and_compared(
    url: str, open_page: OpenPage
) -> None:
    page = open_page(url)
    page.goto(f"{url}/#/state?operator={UID}&state=n")
    page.get_by_role("tab", name="Browse").click()
    page.get_by_text("page 1").wait_for()
    assert page.locator(".answer tbody tr").count() == 100
    page.get_by_role("button", name="Next").click()
    page.get_by_text("page 2").wait_for()
    page.get_by_role("tab", name="SQL").click()
    page.get_by_label("Query", exact=False).fill(f'select max(value) as top from "{UID}.n"')
    page.keyboard.press("Control+Enter")
    page.get_by_role("cell", name="1,001").wait_for()
    page.get_by_role("tab", name="Diff").click()
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("0 added, 1 changed, 0 removed").wait_for()


def test_sql_that_is_wrong_says_what_is_wrong(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.goto(f"{url}/#/state?way=sql")
    page.get_by_label("Query", exact=False).fill("select nonsense from nowhere")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("alert").filter(has_text="nowhere").wait_for()
    # A browser tells of every answer that is a 400 on its console.
    assert all("400" in said for said in page.complaints)
    page.complaints.clear()


def test_an_epoch_arrives_while_the_page_is_open(
    url: str, checkpoint: Checkpoint, open_page: OpenPage
) -> None:
    page = open_page(url)
    page.get_by_text("watching").wait_for()
    page.locator(".age", has_text="epoch 3,").wait_for()
    checkpoint.commit({"n": {"key-2": 2002}})
    page.locator(".age", has_text="epoch 4,").wait_for()


def test_the_theme_is_switched_and_remembered(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Switch between light and dark").click()
    dark = page.evaluate(ground)
    assert light != dark
    page.reload()
    page.wait_for_selector(".page")
    assert page.evaluate(ground) == dark


def test_pages_can_be_reached_and_used_by_keyboard(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the page"
    page.get_by_role("link", name="Epochs").first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Epochs", exact=True).wait_for()
    page.get_by_role("link", name=re.compile("^epoch 3:")).focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Epoch 3").wait_for()


def test_a_dashboard_with_a_token_asks_for_it_once(
    checkpoint: Checkpoint, open_page: OpenPage, chromium: Any
) -> None:
    with serve(Site(checkpoint.store.url, Serve(token=TOKEN, flight=False))) as served:
        page = chromium.new_page()
        page.goto(served.url)
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        page.locator(".age", has_text="epoch 3,").wait_for()
        page.close()


def test_a_browser_that_has_logged_in_can_log_out_in_all_its_tabs(
    checkpoint: Checkpoint, url: str, open_page: OpenPage, chromium: Any
) -> None:
    assert not open_page(url).get_by_role("button", name="Log out").is_visible()
    with serve(Site(checkpoint.store.url, Serve(token=TOKEN, flight=False))) as served:
        context = chromium.new_context()
        page = context.new_page()
        page.goto(served.url)
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        other = context.new_page()
        other.goto(served.url)
        other.locator(".age", has_text="epoch 3,").wait_for()
        page.get_by_role("button", name="Log out").click()
        page.get_by_role("button", name="Log in").wait_for()
        assert context.cookies() == []
        # What is new is not for it any more: it asks, and is sent away.
        checkpoint.commit({"n": {"key-1": 1002}})
        other.get_by_role("button", name="Log in").wait_for()
        context.close()


def test_control_is_not_offered_where_it_is_off(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    assert page.get_by_role("link", name="Control").count() == 0
    page.goto(f"{url}/#/control")
    page.get_by_text("Control is off").wait_for()
