"""A place on which a suite plays: a driver, a slot, and what the audience sees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

from cairn.sinks.base import Committable, Execution, Sink
from tests.places import SCHEMA, Place, batch
from tests.places.base import Row


class Stage:
    """A place with a driver and a slot."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._opened: list[Sink] = []
        self.driver = self.opened()
        self.slot = self.opened(in_slot=True)

    def opened(
        self,
        job_id: str = "job",
        uid: str = "out",
        *,
        in_slot: bool = False,
        schema: pa.Schema = SCHEMA,
    ) -> Sink:
        sink = self.place.opened(job_id, uid, in_slot=in_slot, schema=schema)
        self._opened.append(sink)
        return sink

    def prepare(
        self,
        epoch: int,
        *rows: Row,
        subtask: int = 0,
        slot: Sink | None = None,
        **execution: int,
    ) -> Committable | None:
        writer = (slot or self.slot).writer(epoch, subtask, Execution(**execution))
        for row in rows:
            writer.write(batch(row))
        return writer.prepare()

    def prepared(self, epoch: int, *rows: Row, **where: Any) -> Committable:
        committable = self.prepare(epoch, *rows, **where)
        assert committable is not None
        return committable

    def visible(self, driver: Sink | None = None) -> list[Row]:
        return self.place.seen(driver or self.driver)

    def as_seen(self, *rows: Row) -> list[Row]:
        """Return the rows a reader finds after these were published, one after the other."""
        if self.place.is_keyed:
            rows = tuple({row[0]: row for row in rows}.values())
        return sorted(rows, key=str)

    def assert_sees(self, *rows: Row, driver: Sink | None = None) -> None:
        assert self.visible(driver) == self.as_seen(*rows)

    def assert_survived(self, *rows: Row, driver: Sink) -> None:
        """After a crash in the commit of these rows' epoch, and a commit that came to its end."""
        if self.driver.promise == "exactly-once" or self.place.is_keyed:
            self.assert_sees(*rows, driver=driver)
            return
        seen, expected = Counter(self.visible(driver)), Counter(rows)
        times = {seen[row] / count for row, count in expected.items()}
        assert seen.keys() == expected.keys() and min(times) >= 1
        assert self.driver.shows == "pieces" or len(times) == 1, "a part of an epoch is repeated"

    def leftovers(self) -> list[str]:
        return self.place.leftovers()

    def close_all(self) -> None:
        while self._opened:
            self._opened.pop().close()
