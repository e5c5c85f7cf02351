"""A real Chromium, and pages that must not complain.

Where there is no Chromium these tests are skipped, and say so; `.ci/test` installs Debian's
where it may.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# The session that the Spark tests share.
from tests.spark.conftest import spark as spark

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
NO_CHROMIUM = "BROWSER TESTS DID NOT RUN: no Chromium here; next: apt-get install chromium"


def chromium_path() -> str | None:
    named = os.environ.get("CAIRN_CHROMIUM")
    return named or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


# Not for the whole session: Playwright keeps an event loop running in this thread.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = chromium_path()
    if path is None:
        pytest.skip(NO_CHROMIUM)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox does not run as root, and pages here are our own.
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """open_page(url, width=1440, scheme="light") -> a page; complaints fail the test."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_page(url: str, *, width: int = 1440, scheme: str = "light") -> Any:
        height = 900 if width > 600 else 844
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            # Chromium draws without a graphics card here: what moves takes a whole core.
            reduced_motion="reduce",
        )
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on(
            "console",
            lambda said: (
                complaints.append(f"console: {said.text}")
                if said.type in ("error", "warning")
                else None
            ),
        )
        page.on(
            "request",
            lambda asked: (
                None
                if asked.url.startswith((url, "data:", "blob:"))
                else complaints.append(f"outside: {asked.url}")
            ),
        )
        page.complaints = complaints
        page.goto(url)
        page.wait_for_selector(".page")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
