"""A Python function as a sink: called in the driver for each row of a committed epoch.

For output that is small, or that no Spark writer can deliver: a web hook, a mail, a message
queue. The rows stay in the checkpoint until the function has received all of them.

Always true here:
- rows come in order of the epochs, within one in order of batch, round and subtask;
- when the function raises, or the driver dies, all rows of the epoch come again;
- the function does not leave the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from cairn.crash import crash_point
from cairn.errors import CommitError, PlanError
from cairn.sinks.driver import decode_rows
from cairn.sinks.staged import PublishedEpoch, Staged, StagedFile
from cairn.user_code import check_arguments, find_raise

_TEXT_CHARS_MAX: Final = 500


class Foreach(Staged):
    """Calls `fn(row, epoch)` for each row, or with `batch=True` `fn(rows, epoch)` once an epoch.

    Each row comes at least once. `epoch` is a number; `epoch.key` is a string that is equal
    when the same rows come again, and never otherwise (see `PublishedEpoch`).
    """

    promise = "at-least-once"
    shows = "pieces"
    driver_only = frozenset({"function"})

    def __init__(self, fn: Callable[[Any, PublishedEpoch], object], *, batch: bool = False) -> None:
        if not callable(fn):
            raise PlanError(
                f"a Foreach sink needs a function\n  found: {fn!r}\n"
                f"  expected: a function of {'rows' if batch else 'a row'} and an epoch"
            )
        what = f"a Foreach sink: {getattr(fn, '__name__', type(fn).__name__)}"
        check_arguments(fn, what, "rows" if batch else "row", "epoch")
        self.function = fn
        self.batch = batch

    @property
    def target(self) -> str:
        return "the function of a sinks.Foreach"

    def publish(self, epoch: PublishedEpoch, files: Sequence[StagedFile]) -> None:
        if self.batch:
            self._call(list(self._rows(files)), epoch)
            return
        for row in self._rows(files):
            self._call(row, epoch)
            crash_point("driver.sink.piece")

    def _call(self, given: Any, epoch: PublishedEpoch) -> None:
        try:
            self.function(given, epoch)
        except Exception as error:
            if isinstance(given, tuple):
                what, facts = f"  row: {_short(given)}", {"row": _short(given)}
            else:
                what, facts = f"  rows: {len(given)}", {}
            if (at := find_raise(error, self.function)) is not None:
                what, facts = f"{what}\n  at: {at}", {**facts, "at": at}
            raise CommitError(
                f"the function of sink {self.context.uid!r} raised in epoch {epoch}\n"
                f"  cause: {type(error).__name__}: {str(error)[:_TEXT_CHARS_MAX]}\n{what}\n"
                "  next: fix the function; all rows of the epoch come again until it returns",
                sink=self.context.uid,
                epoch=int(epoch),
                **facts,
            ) from error

    def _rows(self, files: Sequence[StagedFile]) -> Iterator[Any]:
        for file in files:
            for batch in self.batches(file):
                yield from decode_rows(batch)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _TEXT_CHARS_MAX else text[:_TEXT_CHARS_MAX] + "…"
