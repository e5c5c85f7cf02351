"""Managed state, declared as attributes of a function's class.

    class Fraud(KeyedProcess):
        armed = state.Value("boolean", default=False)
        spent = state.Reducing("double", operator.add)

Declared state is known before anything runs, so it can be checked, stored,
moved and read from outside. Inside `process` each attribute is the state of
the current key. Types are Spark DDL, a Spark or Arrow type, or a Python type;
`object` opts in to pickle (readable only by Python, unsafe with untrusted files).

A type may change between runs. Nullable fields may be added, fields dropped and moved, and
numbers widened, with no help. For everything else there is `migrate=`: a function from
the stored value, as Python has it in its old type, to the new one (of a list each item, of
a map each value). It is called when the stored type is not the declared one, also for
values that a later one has replaced. None drops the value; an item of a list cannot be
dropped, for others are told by their place.

    spent = state.Reducing("decimal(18,2)", operator.add, migrate=lambda cents: cents / 100)

State may expire: `ttl="1 hour"` after the last write by the epoch's clock, `ttl=TTL(...)` by
event time or counted from the last read too. Of a map each entry expires, of a list
each item. What has expired is gone for everybody at once, whenever its space is freed. TTL may be
turned on, changed and turned off between runs; values that had none count from then on.

    seen = state.Map("string", "long", ttl=state.TTL("1 day", clock="event", refresh="read-write"))

Beside the state of keys there is state of two other scopes. Each subtask of a `Process` has
its own `OperatorList`, which is redistributed when the parallelism changes; `Broadcast` is a
map that is the same in every subtask, written in `process_broadcast` and read everywhere.
Both are in memory with every backend, and do not expire.

    offsets = state.OperatorList("struct<file:string,row:long>")
    rules = state.Broadcast("string", "double")

Always true here:
- a declaration is immutable and holds no state; using it outside a running
  function raises;
- an attribute is state, not its value: assigning it, or using it as a number, raises;
- None is never stored as a value: setting None clears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, overload

from cairn.errors import PlanError
from cairn.misuse import Stateful, refuse_operators
from cairn.types import TypeLike, parse_type, type_ddl
from cairn.types.durations import Duration, duration_ms

T = TypeVar("T")
S = TypeVar("S")
K = TypeVar("K")
V = TypeVar("V")
Out = TypeVar("Out")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)

Migrate = Callable[[Any], Any]


@dataclass(frozen=True)
class TTL:
    """The lifetime of a value, its clock, and which accesses renew it."""

    duration: Duration
    clock: Literal["processing", "event"] = "processing"
    """The epoch's clock; or the event time of the row or timer at hand, and where there is
    none, the watermark that the epoch before ran with."""
    refresh: Literal["write", "read-write"] = "write"
    ms: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ms", duration_ms(self.duration, "ttl", positive=True))
        for name, known in _TTL_WORDS.items():
            if getattr(self, name) not in known:
                raise PlanError(
                    f"ttl: {name}={getattr(self, name)!r}\n  expected: one of {', '.join(known)}"
                )

    @property
    def text(self) -> str:
        """As manifests have it."""
        return f"{self.ms} ms, {self.clock}, {self.refresh}"

    @staticmethod
    def of(ttl: TTLLike) -> TTL | None:
        """Return the TTL of a declaration, or of a `text`."""
        if ttl is None or isinstance(ttl, TTL):
            return ttl
        if isinstance(ttl, str) and ttl.count(", ") == 2:
            duration, clock, refresh = ttl.split(", ")
            return TTL(duration, clock, refresh)  # type: ignore[arg-type]
        return TTL(ttl)


_TTL_WORDS = {"clock": ("processing", "event"), "refresh": ("write", "read-write")}
TTLLike = Duration | TTL | None


class Declaration(Stateful):
    """Base of all kinds: a type, and a name given by the class that declares it."""

    kind: str = ""
    layout: Literal["value", "list", "map"] = "value"
    """The form in which it is stored."""

    def __init__(
        self, declared: TypeLike, *, migrate: Migrate | None = None, ttl: TTLLike = None
    ) -> None:
        self.declared = declared
        self.type = parse_type(declared)
        self.name = ""
        if migrate is not None and not callable(migrate):
            raise PlanError(f"migrate= needs a function of the stored value, found {migrate!r}")
        self.migrate = migrate
        self.ttl = TTL.of(ttl)

    def __set_name__(self, owner: type, name: str) -> None:
        if self.name and self.name != name:
            raise PlanError(
                f"state {name!r} of {owner.__name__} is the object already declared as "
                f"{self.name!r}\n  next: declare each state with an object of its own",
                state=name,
            )
        self.name = name

    @property
    def entry_type(self) -> Any:
        """The type of the second key, for kinds that have one."""
        return None

    @property
    def ddl(self) -> str:
        return type_ddl(self.type)

    @property
    def entry_ddl(self) -> str | None:
        return None if self.entry_type is None else type_ddl(self.entry_type)

    def __repr__(self) -> str:
        if "type" in vars(self):
            return f"<state {self.kind} {self.name or '?'}: {self.ddl}>"
        # In a running function it is mostly seen where its value was meant.
        return f"<state {self.kind} {self.name}: use {self.reads.format(f'self.{self.name}')}>"


def _unbound(declaration: Declaration) -> PlanError:
    return PlanError(
        f"state {declaration.name!r} is used outside a running function\n"
        "  next: use it in process(), or drive the function with cairn.testing.Harness",
        state=declaration.name,
    )


def _not_by_batch(declaration: Declaration) -> PlanError:
    return PlanError(
        f"state {declaration.name!r} is asked for many keys at once\n"
        "  expected: that in a running BatchProcess only\n"
        "  next: run the function with .process_batch(...), or with cairn.testing.Harness",
        state=declaration.name,
    )


class Value(Declaration, Generic[T]):
    """One value per key. `Value[T]` gives a T: with a default an int, else an `int | None`."""

    kind = "value"
    reads = "{}.get()"
    writes = "{}.set(value)"

    @overload
    def __init__(
        self: Value[S | None],
        declared: type[S],
        *,
        default: None = None,
        migrate: Migrate | None = None,
        ttl: TTLLike = None,
    ) -> None: ...
    @overload
    def __init__(
        self: Value[S],
        declared: type[S],
        *,
        default: S,
        migrate: Migrate | None = None,
        ttl: TTLLike = None,
    ) -> None: ...
    @overload
    def __init__(
        self: Value[Any],
        declared: TypeLike,
        *,
        default: Any = None,
        migrate: Migrate | None = None,
        ttl: TTLLike = None,
    ) -> None: ...
    def __init__(
        self,
        declared: TypeLike,
        *,
        default: Any = None,
        migrate: Migrate | None = None,
        ttl: TTLLike = None,
    ) -> None:
        super().__init__(declared, migrate=migrate, ttl=ttl)
        self.default = default

    @overload
    def get(self) -> T: ...
    @overload
    def get(self: Value[S | None], default: S) -> S: ...
    @overload
    def get(self, default: T) -> T: ...
    def get(self, default: Any = None) -> Any:
        """Return the value, else `default`, else the declared default."""
        raise _unbound(self)

    def set(self, value: T | None) -> None:
        raise _unbound(self)

    def clear(self) -> None:
        raise _unbound(self)

    def get_many(self, keys: Any) -> Any:
        """In a BatchProcess: the value of each key, as an Arrow array.

        Where there is none: null, or the declared default.
        """
        raise _not_by_batch(self)

    def put_many(self, keys: Any, values: Any) -> None:
        """In a BatchProcess: set the value of each key; null clears. The last word counts."""
        raise _not_by_batch(self)


class _Items(Declaration, Generic[T]):
    """A declaration that editors and type checkers know as the list it will be."""

    reads = "list({})"
    writes = "{0}.append(value), or {0}.set(values)"

    def __iter__(self) -> Iterator[T]:
        raise _unbound(self)

    def __len__(self) -> int:
        raise _unbound(self)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        raise _unbound(self)

    def append(self, value: T) -> None:
        raise _unbound(self)

    def extend(self, values: Iterable[T]) -> None:
        raise _unbound(self)

    def set(self, values: Iterable[T]) -> None:
        raise _unbound(self)

    def clear(self) -> None:
        raise _unbound(self)


class List(_Items[T]):
    """A list per key. Appending costs what is appended, in memory and in the snapshot."""

    kind = "list"
    layout = "list"


class _Mapping(Declaration, MutableMapping[K, V]):
    """A declaration that editors and type checkers know as the mapping it will be."""

    def __getitem__(self, key: K) -> V:
        raise _unbound(self)

    def __setitem__(self, key: K, value: V) -> None:
        raise _unbound(self)

    def __delitem__(self, key: K) -> None:
        raise _unbound(self)

    def __iter__(self) -> Iterator[K]:
        raise _unbound(self)

    def __len__(self) -> int:
        raise _unbound(self)

    def clear(self) -> None:
        raise _unbound(self)


class Map(_Mapping[K, V]):
    """A mapping per key; each entry is stored on its own. Iterates in order of the map keys."""

    kind = "map"
    layout = "map"
    reads = "{0}[key], or dict({0})"
    writes = "{}[key] = value"
    by_time: bool = False
    """Set by ready-made functions: map keys are times, and `between` is to read those that are due.
    A database then stores the entries by time too."""

    def __init__(
        self, key: TypeLike, value: TypeLike, *, migrate: Migrate | None = None, ttl: TTLLike = None
    ) -> None:
        super().__init__(value, migrate=migrate, ttl=ttl)
        self._entry_type = parse_type(key)

    @property
    def entry_type(self) -> Any:
        return self._entry_type

    def get_many(self, keys: Any, entries: Any) -> Any:
        """In a BatchProcess: the value of an entry of each key, null where there is none."""
        raise _not_by_batch(self)

    def put_many(self, keys: Any, entries: Any, values: Any) -> None:
        """In a BatchProcess: set an entry of each key; a null value deletes it."""
        raise _not_by_batch(self)

    def of_keys(self, keys: Any) -> tuple[Any, Any, Any]:
        """In a BatchProcess: every entry of these keys, as (index into keys, entry, value).

        Ordered by index, then by entry.
        """
        raise _not_by_batch(self)

    def between(self, low: Any, high: Any) -> tuple[Any, Any, Any]:
        """In a BatchProcess: (key, entry, value) wherever low < entry <= high, of any key here.

        None means no bound. Ordered by entry, then by key.
        """
        raise _not_by_batch(self)


class Reducing(Declaration, Generic[T]):
    """One value per key, folded with a function: `add(x)` stores `reduce(stored, x)`."""

    kind = "reducing"
    reads = "{}.get()"
    writes = "{0}.add(value), or {0}.clear()"

    def __init__(
        self,
        declared: TypeLike,
        reduce: Callable[[T, T], T],
        *,
        migrate: Migrate | None = None,
        ttl: TTLLike = None,
    ) -> None:
        super().__init__(declared, migrate=migrate, ttl=ttl)
        if not callable(reduce):
            raise PlanError(f"Reducing needs a function of two values, found {reduce!r}")
        self.reduce = reduce

    def add(self, value: T) -> None:
        raise _unbound(self)

    @overload
    def get(self) -> T | None: ...
    @overload
    def get(self, default: T) -> T: ...
    def get(self, default: T | None = None) -> T | None:
        """Return the folded value, else `default`."""
        raise _unbound(self)

    def clear(self) -> None:
        raise _unbound(self)


class Aggregate(Protocol[In_contra, Out_co]):
    """Two-step aggregation: what is stored (an accumulator) differs from what is read.

    `merge` combines two accumulators, where state of two keys or windows becomes one.
    """

    def create(self) -> Any: ...
    def add(self, accumulator: Any, value: In_contra) -> Any: ...
    def merge(self, left: Any, right: Any) -> Any: ...
    def result(self, accumulator: Any) -> Out_co: ...


class Aggregating(Declaration, Generic[V, Out]):
    """An accumulator per key: `add` folds a value in, `get` gives the aggregate's result."""

    kind = "aggregating"
    reads = "{}.get()"
    writes = "{0}.add(value), or {0}.clear()"

    def __init__(
        self,
        declared: TypeLike,
        aggregate: Aggregate[V, Out],
        *,
        migrate: Migrate | None = None,
        ttl: TTLLike = None,
    ) -> None:
        super().__init__(declared, migrate=migrate, ttl=ttl)
        missing = [
            name
            for name in ("create", "add", "merge", "result")
            if not callable(getattr(aggregate, name, None))
        ]
        if missing:
            raise PlanError(
                f"{type(aggregate).__name__} is not an aggregate: it has no {', '.join(missing)}\n"
                "  next: give it create(), add(acc, value), merge(a, b) and result(acc)"
            )
        self.aggregate = aggregate

    def add(self, value: V) -> None:
        raise _unbound(self)

    @overload
    def get(self) -> Out | None: ...
    @overload
    def get(self, default: Out) -> Out: ...
    def get(self, default: Out | None = None) -> Out | None:
        """Return the aggregate's result, else `default`."""
        raise _unbound(self)

    def clear(self) -> None:
        raise _unbound(self)


PLACE: Final = "struct<at:bigint,copy:bigint>"
"""The key of an item of an operator list: where it stands in the list of its subtask,
and, of an item that every subtask was handed, its number; otherwise -1. Copies count once."""


class OperatorList(_Items[T]):
    """A list per subtask, of a `Process`. Appending costs what is appended.

    When the parallelism changes the lists are joined, in the order of the subtasks, and
    redistributed: "split" gives each subtask an even share, in order, "union" gives all items
    to all. Copies of an item that "union" has handed out are one item the next time, as long as
    they are left in the list; `set` leaves those that are equal to what it sets.
    """

    kind = "operator_list"
    layout = "map"

    def __init__(
        self,
        declared: TypeLike,
        *,
        redistribute: Literal["split", "union"] = "split",
        migrate: Migrate | None = None,
        ttl: None = None,
    ) -> None:
        _refuse_ttl(self, ttl)
        super().__init__(declared, migrate=migrate)
        if redistribute not in ("split", "union"):
            raise PlanError(
                f"OperatorList: redistribute={redistribute!r}\n  expected: one of split, union"
            )
        self.redistribute = redistribute
        self._entry_type = parse_type(PLACE)

    @property
    def entry_type(self) -> Any:
        return self._entry_type


class Broadcast(_Mapping[K, V]):
    """A mapping that is the same in every subtask. Iterates in order of its keys.

    Written in `process_broadcast` only, by rows that all subtasks get in one order. It is
    stored once, whatever the parallelism.
    """

    kind = "broadcast"
    reads = "{0}[key], or dict({0})"
    writes = "{}[key] = value, in process_broadcast()"

    def __init__(
        self, key: TypeLike, value: TypeLike, *, migrate: Migrate | None = None, ttl: None = None
    ) -> None:
        _refuse_ttl(self, ttl)
        super().__init__(value, migrate=migrate)
        self.key_type = parse_type(key)

    @property
    def key_ddl(self) -> str:
        return type_ddl(self.key_type)


_ONE_VALUE: Final = (Value, Reducing, Aggregating)
ONE_VALUE_KINDS: Final = frozenset(each.kind for each in _ONE_VALUE)
"""Kinds of keyed state that store one value per key: readers treat them alike, and a state may
change from one to another between runs."""

refuse_operators(*_ONE_VALUE)
refuse_operators(List, Map, OperatorList, Broadcast, are_containers=True)


def _refuse_ttl(declaration: Declaration, ttl: object) -> None:
    if ttl is not None:
        raise PlanError(
            f"{type(declaration).__name__} has no ttl: only state of keys expires\n"
            "  next: leave ttl= out, and remove what is old in the function"
        )
