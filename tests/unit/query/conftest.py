"""For all tests of queries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.query.queried import during


@pytest.fixture(autouse=True)
def nobody_asks() -> Iterator[None]:
    """While functions run, but for those that a test has asking."""
    during.clear()
    yield
    during.clear()
