"""The ledger while it runs, fed a file at a time; and what it comes to when nobody touches it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.spark.programs.ledger import SCHEMA, build, payments
from tests.spark.support import Input, by_id, epochs, finish, published, stored_state

FILES = 6


class Undisturbed:
    """What the job comes to after any number of its files."""

    def __init__(self, spark: Any, folder: Path, files: Sequence[Sequence[Any]]) -> None:
        self.files = files
        self.source = Input(folder / "in", SCHEMA).add_all(files)
        self.job = build(spark, self.source.folder, folder)
        self.checkpoint = folder / "checkpoint"
        finish(self.job, self.checkpoint, retained_epochs=100)
        self.epochs = [epoch.number for epoch in epochs(self.checkpoint)]
        self._booked = by_id(published(folder / "booked"))

    def booked(self, first: int = 0, end: int | None = None) -> list[dict[str, Any]]:
        """The rows that files `first` to `end` (without it) give."""
        size = len(self.files[0])
        return self._booked[first * size : None if end is None else end * size]

    def state(self, files: int | None = None) -> dict[str, dict[str, Any]]:
        """After so many files; default: all."""
        return stored_state(self.job, self.checkpoint, self.epochs[-1 if not files else files - 1])


class Live:
    """A job on its way. Its input, output and checkpoint lie in one folder."""

    def __init__(
        self,
        spark: Any,
        folder: Path,
        files: Sequence[Sequence[Any]] | None = None,
        function: Any = None,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.files = payments(FILES) if files is None else files
        self.source = Input(folder / "in", SCHEMA)
        self.job = build(spark, self.source.folder, folder, function)
        self.checkpoint = folder / "checkpoint"
        self.run = self.job.start(
            checkpoint=str(self.checkpoint),
            trigger="50 milliseconds",
            **{"parallelism": 2, **options},
        )

    def feed(self, files: int = 1) -> Any:
        """So many more files, an epoch each; the newest epoch."""
        for rows in self.files[self.source.count :][:files]:
            self.source.add(*rows)
            self.run.process_all_available()
        return epochs(self.checkpoint)[-1]

    def booked(self) -> list[dict[str, Any]]:
        return by_id(published(self.folder / "booked"))

    def state(self) -> dict[str, dict[str, Any]]:
        return stored_state(self.job, self.checkpoint)

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *exc: object) -> None:
        self.run.__exit__(*exc)  # type: ignore[arg-type]
