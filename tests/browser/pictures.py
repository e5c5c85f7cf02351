"""Take the pictures of the dashboard that the documentation shows.

    python -m tests.browser.pictures docs/pictures

A real job runs for about a minute and a half meanwhile; nothing in the pictures is made up.
"""

from __future__ import annotations

import datetime as dt
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cairn
from cairn import Serve
from tests.browser.conftest import NO_CHROMIUM, chromium_path
from tests.browser.payments import PAYMENT, build, payments
from tests.spark.support import Input

FILES = 90
# (name, page, width, scheme)
PICTURES = (
    ("dashboard", "", 1440, "light"),
    ("dashboard-dark", "", 1440, "dark"),
    ("dashboard-narrow", "", 390, "dark"),
    ("dashboard-groups", "groups?operator=score", 1440, "light"),
    ("dashboard-state", "state?operator=score&state=merchants", 1440, "light"),
    ("dashboard-charts", "charts", 1440, "light"),
)


def main(folder: Path) -> None:
    path = chromium_path()
    if path is None:
        sys.exit(NO_CHROMIUM)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cairn-pictures-") as place:
        _run(Path(place), path, folder)


def _run(place: Path, path: str, folder: Path) -> None:
    spark = cairn.session("pictures", master="local[2]", ui__enabled=False)
    source = Input(place / "in", PAYMENT)
    job = build(spark, place)
    start: dict[str, Any] = {
        "checkpoint": str(place / "checkpoint"),
        "trigger": "200 milliseconds",
        "retained_epochs": FILES,
        "on_error": "dead-letter",
    }
    with job.start(parallelism=2, **start) as run:
        for at in range(FILES // 3):
            _feed(source, at)
            run.process_all_available()
        run.savepoint(str(place / "before-release"))
    with job.start(parallelism=4, serve=Serve(flight=False), **start) as run:
        for at in range(FILES // 3, FILES):
            _feed(source, at)
            run.process_all_available()
        _take(str(run.url), path, folder)
    spark.stop()


def _feed(source: Input, at: int) -> None:
    bad = 2 if at % 23 == 5 else 0
    source.add(*payments(at, 6000, bad=bad, now=dt.datetime.now(dt.UTC)))


def _take(url: str, path: str, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, where, width, scheme in PICTURES:
            height = 960 if width > 600 else 844
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,  # type: ignore[arg-type]
            )
            page.goto(f"{url}/#/{where}")
            page.locator(".pulse.is-live").wait_for()
            _prepare(page, name)
            time.sleep(0.8)
            page.screenshot(path=folder / f"{name}.png")
            page.close()
        browser.close()


def _prepare(page: Any, name: str) -> None:
    if name == "dashboard-state":
        page.get_by_label("Key (card string)").fill("card-0007")
        page.keyboard.press("Enter")
        page.get_by_text("answered by the running job").wait_for()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
