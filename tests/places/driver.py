"""The driver's memory."""

from __future__ import annotations

from typing import Any

from cairn.sinks import Collect
from cairn.sinks.base import Sink
from tests.places.base import Place, Row


class CollectPlace(Place):
    is_shared = False
    has_mark = False
    has_target = False

    def make(self) -> Sink:
        return Collect()

    def rows(self, driver: Any) -> list[Row]:
        return [tuple(row) for row in driver.rows]

    def leftovers(self) -> list[str]:
        return [str(path) for path in self.scratch.iterdir()]
