"""User functions: a class with declared state, and code that runs for each row of a key."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from cairn.errors import PlanError
from cairn.metrics import Metrics
from cairn.misuse import no_assignment, no_deletion
from cairn.state import Broadcast, Declaration, Map
from cairn.types.durations import Duration

if TYPE_CHECKING:
    import pyarrow as pa

Row = TypeVar("Row")

LATE = "late"
"""The side output of rows that came too late, or without a time."""


def late_tag(input: str = "") -> str:
    """The same of one of several inputs."""
    return f"{LATE}.{input}" if input else LATE


ERRORS = "errors"
"""The side output of rows that a function failed on, with `on_error="dead-letter"`."""

EVENT_TIMERS = "timers.event"
PROCESSING_TIMERS = "timers.processing"
"""Timers are state like any other: from key to {time in milliseconds: True}."""


class Timers(Protocol):
    """The timers of the key at hand: `on_timer` is called when their time has come.

    A time is in milliseconds since 1970, or a datetime (a naive one is UTC). There is one
    timer per key, kind and time: setting it again changes nothing.
    """

    def event(
        self, at: int | dt.datetime | None = None, *, after: Duration | int | None = None
    ) -> None:
        """Due when the watermark has come to `at`.

        `after` is a duration ("1 minute", a timedelta, or milliseconds) from the row's event
        time; in `on_timer`, from the timer's.
        """

    def processing(
        self, at: int | dt.datetime | None = None, *, after: Duration | int | None = None
    ) -> None:
        """Due when the epoch's clock has come to `at`; `after` counts from `ctx.now_ms`."""

    def delete_event(self, at: int | dt.datetime) -> None:
        """Delete an event timer; there need not be one."""

    def delete_processing(self, at: int | dt.datetime) -> None:
        """Delete a processing timer; there need not be one."""


class Context(Protocol):
    """Facts about the row at hand and the epoch it belongs to."""

    key: Any
    """The key: the column's value, or a named tuple where several columns make the key."""
    event_time_ms: int | None
    """The row's event time; in `on_timer` the time of an event timer."""
    watermark_ms: int | None
    now_ms: int
    """The epoch's clock: fixed while the epoch runs, the same when it runs again."""
    epoch: int
    subtask: int
    parallelism: int
    timers: Timers
    timer_kind: Literal["event", "processing"] | None
    """The kind of timer that `on_timer` is called for; None in `process`."""
    metrics: Metrics
    """Counters, gauges and histograms of this function: `ctx.metrics.counter("hits").inc()`."""
    broadcast: Broadcast[Any, Any]
    """The state of `.broadcast(rows, ...)`: written in `process_broadcast`, read everywhere."""

    def output(self, tag: str, row: Any) -> None:
        """Emit a row on a side output, declared with `.side(tag, schema)`."""


class BatchContext(Protocol):
    """Facts about the rows at hand and the epoch they belong to."""

    keys: pa.Array
    """The key of each row: the column, or a struct array where several columns make the key."""
    times_us: pa.Array | None
    """The event time of each row in microseconds, where one is declared."""
    watermark_ms: int | None
    late_ms: int | None
    """Rows with an earlier event time are late."""
    now_ms: int
    epoch: int
    subtask: int
    parallelism: int
    metrics: Metrics

    def count_late(self, rows: int) -> None:
        """Tell of rows that the function itself has found to be late."""

    def output(self, tag: str, batch: Any) -> None:
        """Emit a record batch or a table on a side output."""


class Function:
    """Base of all functions: declared state, and a life in the slots.

    An object is sent to the slots by value and lives there between epochs; what
    must survive a crash belongs into state, not into other attributes.
    """

    def open(self, ctx: Context) -> None:
        """Once per slot and function version, before the first row."""

    def on_epoch_committed(self, epoch: int) -> None:
        """An epoch is committed and will not be undone: told at the beginning of the next one.

        Told to every slot, in order; epochs may be left out when a slot was lost.
        """

    def close(self) -> None:
        """Before the slot ends or the function is replaced."""

    if not TYPE_CHECKING:  # A checker would take it for leave to assign any attribute.

        def __setattr__(self, name: str, value: Any) -> None:
            state = _state_named(self, name)
            if state is None:
                super().__setattr__(name, value)
            elif value is not state:  # A dataclass assigns what its class has declared.
                raise no_assignment(state)

        def __delattr__(self, name: str) -> None:
            state = _state_named(self, name)
            if state is not None:
                raise no_deletion(state)
            super().__delattr__(name)


class Hooks:
    """Further properties of the functions in `cairn.operators`; a user's function has none."""

    handles_late: bool = False
    """The function gets late rows like all others, instead of their going to the side output."""
    forgets: bool = False
    """The watermark removes state: an older row is late, even if a loop sent it back."""
    wants_order: bool = True
    """Rows of a key come in the order of their event time, if they have one."""
    result_time: str | None = None
    """Column of the output with the exclusive end of the time that a row is about; "" for none.
    If None, the output keeps the event time column of the input, found by name."""
    result_shift_us: int = -1
    """Microseconds from `result_time` to the event time of the output."""
    result_keys: tuple[str, ...] = ()
    """Columns of the output that hold the key of the rows that a result is made from, in the
    order of the key; empty if there are none."""
    result_delay_ms: int = 0
    """Upper bound of the output's delay behind the input's watermark. Operators that read the
    output have a watermark that is this far behind too."""
    ignores_time: bool = False
    """The function gets all rows as they come, also late ones and those without a time."""
    called: ClassVar[str] = "process"
    """The method that is called for a row, as errors name it."""
    retired_states: ClassVar[frozenset[str]] = frozenset()
    """States of earlier versions of the function that this one does without."""
    reads_row_times: ClassVar[bool] = False
    """`ctx.row_times_us` iterates over the event times of the rows, in microseconds."""

    def declare_state(self) -> dict[str, Declaration]:
        """Return state beyond the class attributes, for functions made from a description."""
        return {}


_NO_HOOKS = Hooks()


def hooks_of(function: Function) -> Hooks:
    """Return the hooks of a function: its own, or the defaults for a user's function."""
    return function if isinstance(function, Hooks) else _NO_HOOKS


class KeyedProcess(Function, Generic[Row]):
    """Code and state per key. Subclass it, declare state as class attributes.

    `process` returns or yields rows (tuples, dicts or row objects), or nothing. On connected
    streams there is a method `on_<name>(row, ctx)` for each of them in its place.
    """

    def process(self, row: Row, ctx: Context) -> Any:
        """Each row, with `ctx.key` and the state set to its key."""
        raise PlanError(f"{type(self).__name__} defines no process(row, ctx)")

    def on_timer(self, time_ms: int, ctx: Context) -> Any:
        """A timer of this key is due, and no longer set; emits rows like `process` does.

        Timers are set with `ctx.timers` and come in order of their times. One that is set
        here and is due already is called in the same epoch.
        """

    def on_timer_failed(self, time_ms: int, ctx: Context) -> None:
        """With `on_error="dead-letter"`: `on_timer` raised, and what it did is undone.

        The timer is gone. What waits for it can be given up here, or a later one set.
        """

    def on_epoch_end(self, ctx: Context) -> Any:
        """Each key that got a row in the epoch, after the last row and timer of all keys.

        It emits rows like `process` does: one result per key and epoch, however many rows came.
        In a job whose loops have rounds, it is called at the end of each round; with
        `checkpoint_every`, of each batch.
        """

    def process_broadcast(self, row: Any, ctx: Context) -> Any:
        """Each row of a broadcast, before the other rows of the epoch, the same in all subtasks.

        `ctx.broadcast` may be written here, and only here; no key is at hand.
        """


class Process(Function, Generic[Row]):
    """Code without keys, on any stream. Each subtask has its own state, an `OperatorList`.

    `process` returns or yields rows (tuples, dicts or row objects), or nothing.
    """

    def process(self, row: Row, ctx: Context) -> Any:
        """Each row that comes to this subtask; `ctx.key` is None."""
        raise PlanError(f"{type(self).__name__} defines no process(row, ctx)")

    def process_broadcast(self, row: Any, ctx: Context) -> Any:
        """Each row of a broadcast, before the other rows of the epoch, the same in all subtasks.

        `ctx.broadcast` may be written here, and only here.
        """


class BatchProcess(Function):
    """Code and state by the batch: Arrow in, Arrow out. Subclass it, declare Value and Map state.

    `process` and `end_epoch` return a record batch, a table, an iterable of them, or nothing;
    columns are found by name. State is read and written for many keys at once:

        keys = batch["k"]                        # as ctx.keys has them
        values = self.total.get_many(keys)       # an array, null where there is none
        self.total.put_many(keys, values)        # null clears

    A batch holds rows of many keys, and a key may come in several batches of an epoch. On
    connected streams there is a method `on_<name>(batch, ctx)` for each of them in the place of
    `process`: gathered rows are passed input by input, in the order of `connect`.
    """

    def begin_epoch(self, ctx: BatchContext) -> None:
        """Before the first row of each attempt at an epoch."""

    def process(self, batch: pa.RecordBatch, ctx: BatchContext) -> Any:
        """Some rows, in order; `ctx.keys` are their keys and `ctx.times_us` their event times."""
        raise PlanError(f"{type(self).__name__} defines no process(batch, ctx)")

    def end_epoch(self, ctx: BatchContext) -> Any:
        """After the last row of each epoch, also of one without rows.

        In a job whose loops have rounds, after the last row of each round.
        """

    def next_timer(self, ctx: BatchContext) -> tuple[int | None, int | None]:
        """By event time and by the clock: when `end_epoch` has something to do without a row.

        Asked after `end_epoch`. An epoch is run then, even if the sources are silent.
        """
        return None, None


class PartialProcess(BatchProcess):
    """A BatchProcess whose rows stand for rows of the stream, one or many each."""

    partial_count: int = 0
    """Number of partials that aggregating before the shuffle would leave of the epoch's rows."""

    def row_count(self, rows: pa.StructArray) -> int:
        """Return the number of rows of the stream that these stand for."""
        raise NotImplementedError

    def late_rows(self, rows: pa.StructArray) -> pa.RecordBatch | None:
        """The rows of the stream that these are, where they carry them."""
        raise NotImplementedError


def bind_state(function: Function, name: str, handle: Declaration) -> None:
    """Make an attribute of a function the state of the key at hand."""
    object.__setattr__(function, name, handle)


def _state_named(function: Function, name: str) -> Declaration | None:
    """The state that an attribute stands for, as far as it stands for one."""
    # Functions assign plain attributes for every row: one look for those.
    own = function.__dict__
    held = own[name] if name in own else getattr(type(function), name, None)
    return held if isinstance(held, Declaration) else None


def find_states(function: Function) -> dict[str, Declaration]:
    """Return the state that a function declares, by name, base classes first."""
    found: dict[str, Declaration] = {}
    for cls in reversed(type(function).__mro__):
        for name, attribute in vars(cls).items():
            if isinstance(attribute, Declaration):
                _check_declared(function, name, attribute, found)
                found[name] = attribute
            elif name in found:
                raise PlanError(
                    f"{type(function).__name__}.{name} is declared as state and then replaced "
                    f"by {type(attribute).__name__} in {cls.__name__}\n"
                    "  next: give one of them another name"
                )
    for name, attribute in vars(function).items():
        # A frozen dataclass assigns what its class has declared.
        if isinstance(attribute, Declaration) and name not in found:
            raise PlanError(
                f"state {name!r} is declared on the object {type(function).__name__}(), not on its "
                "class\n  next: declare it as a class attribute",
                state=name,
            )
    timers = timer_states() if has_timers(function) else {}
    return found | hooks_of(function).declare_state() | timers


def _check_declared(
    function: Function, name: str, declaration: Declaration, found: dict[str, Declaration]
) -> None:
    """Refuse a state whose name or object is taken."""
    kind = type(function).__name__
    for base in type(function).__mro__:
        # Any attribute of cairn's own classes: the engine may read it.
        if base.__module__ not in (__name__, "builtins") or name not in vars(base):
            continue
        raise PlanError(
            f"state {name!r} of {kind} replaces {base.__name__}.{name}, which cairn itself uses\n"
            "  next: give the state another name",
            state=name,
        )
    if name in found and found[name] is not declaration:
        raise PlanError(
            f"state {name!r} is declared twice in {kind}\n"
            f"  found: {found[name]!r} and {declaration!r}\n"
            "  next: give one of them another name",
            state=name,
        )
    other = next((n for n, each in found.items() if each is declaration and n != name), None)
    if other is not None:
        raise PlanError(
            f"states {other!r} and {name!r} are the same object\n"
            "  next: declare each with a call of its own"
        )


def has_timers(function: Function) -> bool:
    """True if a function can set timers: it defines `on_timer`."""
    if not isinstance(function, KeyedProcess):
        return False
    return type(function).on_timer is not KeyedProcess.on_timer


def ends_epochs(function: Function) -> bool:
    """True if a function is called for its keys at the end of an epoch."""
    if not isinstance(function, KeyedProcess):
        return False
    return type(function).on_epoch_end is not KeyedProcess.on_epoch_end


def timer_states() -> dict[str, Declaration]:
    """The states that timers are kept in. No attribute can have such a name."""
    states: dict[str, Declaration] = {}
    for name in (EVENT_TIMERS, PROCESSING_TIMERS):
        states[name] = Map("long", "boolean")
        states[name].name = name
    return states
