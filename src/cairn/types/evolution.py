"""Read state whose declared type has changed since it was stored.

`compare` decides before anything runs, from the types alone; `reshape` then turns stored
rows of the old type into rows of the declared one while they are read. These changes need no
help, at any depth: nullable fields added, fields dropped and moved, numbers widened
without loss, NOT NULL removed. Every other change needs the declaration's `migrate=`.

Always true here:
- `reshape` converts everything that `compare` accepts without migrate=, without loss and
  without a step per row;
- keys and map entries are never converted: they would hash and order differently;
- a row that deletes still deletes afterwards, and rows keep their number and order.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import pyarrow as pa

from cairn.errors import FunctionError
from cairn.state import ONE_VALUE_KINDS, TTL, Declaration
from cairn.types import OBJECT, parse_type, type_ddl
from cairn.types.codec import codec
from cairn.types.codec.core import Values
from cairn.types.codec.stamped import join_stamps, list_parts, split_stamps
from cairn.user_code import find_raise

if TYPE_CHECKING:
    from cairn.storage.manifest import StateDecl

_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200
_MESSAGE_CHARS_MAX: Final = 1000

# Wider types hold every value of the narrower one. A double does not hold every bigint.
_WIDER: Final[dict[pa.DataType, set[pa.DataType]]] = {
    pa.int8(): {pa.int16(), pa.int32(), pa.int64(), pa.float64()},
    pa.int16(): {pa.int32(), pa.int64(), pa.float64()},
    pa.int32(): {pa.int64(), pa.float64()},
    pa.float32(): {pa.float64()},
}


class IncompatibleError(Exception):
    """Stored state cannot be read as it is declared now."""

    def __init__(self, reason: str, next_step: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.next_step = next_step


def compare(held: StateDecl, declaration: Declaration) -> Literal["same", "migrate"]:
    """Return whether stored state must be converted; IncompatibleError if it cannot be."""
    stored, wanted = _layout(held.kind), _layout(declaration.kind)
    if stored != wanted:
        raise IncompatibleError(
            f"a {held.kind} state cannot become a {declaration.kind} state",
            f"declare it as state.{held.kind.capitalize()}, or give the state a new name",
        )
    if held.entry_type is not None and not _equal(
        parse_type(held.entry_type), declaration.entry_type
    ):
        raise IncompatibleError(
            "the type of map keys decides how they hash and sort, so it cannot change",
            f"declare the map keys as {held.entry_type}, or give the state a new name",
        )
    old = parse_type(held.type)
    is_equal = _equal(old, declaration.type)
    if is_equal and held.ttl is None and declaration.ttl is None:
        return "same"
    if is_equal and held.ttl is not None and not revives(held, declaration):
        return "same"
    if declaration.migrate is None and not is_equal:
        _check(old, declaration.type, "")
    return "migrate"


def is_wider(old: pa.DataType, new: pa.DataType) -> bool:
    """True if the new type holds every number of the old one."""
    return new in _WIDER.get(old, ())


def revives(held: StateDecl, declaration: Declaration) -> bool:
    """True if values that expired under the old ttl would live again under the new one.

    Some slots may have removed them and others not, so they must be left out.
    """
    old, new = TTL.of(held.ttl), declaration.ttl
    return old is not None and (new is None or new.clock != old.clock or new.ms > old.ms)


def _layout(kind: str) -> str:
    return "value" if kind in ONE_VALUE_KINDS else kind


def _equal(left: pa.DataType, right: pa.DataType) -> bool:
    return left is right or type_ddl(left) == type_ddl(right)


_MIGRATE: Final = "pass migrate= to the declaration, or give the state a new name"


def _check(old: pa.DataType, new: pa.DataType, path: str) -> None:
    """Raise unless the new type holds every value of the old one."""
    if old is OBJECT or new is OBJECT:
        raise _refuse(old, new, path, "only Python code can turn one into the other")
    if _equal(old, new) or is_wider(old, new):
        return
    types = pa.types
    if types.is_struct(old) and types.is_struct(new):
        _check_struct(old, new, path)
    elif types.is_list(old) and types.is_list(new):
        _check(old.value_type, new.value_type, f"{path}[]")
    elif types.is_map(old) and types.is_map(new):
        if not _equal(old.key_type, new.key_type):
            raise _refuse(old.key_type, new.key_type, f"{path}{{key}}", "map keys cannot change")
        _check(old.item_type, new.item_type, f"{path}{{}}")
    elif types.is_decimal(old) and types.is_decimal(new):
        whole = new.precision - new.scale >= old.precision - old.scale
        if not (whole and new.scale >= old.scale):
            raise _refuse(old, new, path, "digits would be lost")
    else:
        why = "values could be lost" if _is_number(old) and _is_number(new) else ""
        raise _refuse(old, new, path, why)


def _check_struct(old: pa.DataType, new: pa.DataType, path: str) -> None:
    held = {field.name: field for field in old}
    for field in new:
        where = f"{path}.{field.name}"
        before = held.get(field.name)
        if before is None:
            if not field.nullable:
                raise IncompatibleError(
                    f"{_place(where)} is new and NOT NULL, but stored values have no value for it",
                    f"make {field.name!r} nullable (`| None` in a class), or {_MIGRATE}",
                )
        elif before.nullable and not field.nullable:
            raise IncompatibleError(
                f"{_place(where)} may be null in stored values and is declared NOT NULL",
                f"make {field.name!r} nullable (`| None` in a class), or {_MIGRATE}",
            )
        else:
            _check(before.type, field.type, where)


def _refuse(old: pa.DataType, new: pa.DataType, path: str, why: str) -> IncompatibleError:
    reason = f"{_place(path)} cannot go from {type_ddl(old)} to {type_ddl(new)} by itself"
    return IncompatibleError(f"{reason}: {why}" if why else reason, _MIGRATE)


def _place(path: str) -> str:
    return f"field {path.removeprefix('.')!r}" if path else "it"


def _is_number(type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(type) or types.is_floating(type) or types.is_decimal(type))


def reshape(
    batch: pa.RecordBatch,
    declaration: Declaration,
    key_type: pa.DataType,
    *,
    operator: str,
    held: StateDecl | None = None,
    stamp_ms: int = 0,
) -> pa.RecordBatch:
    """Return stored rows, in the layout of the state's kind, as rows of the declared type.

    `held` is the epoch's record of the state. Without it the old type is that of the
    rows, where pickled objects look like plain binary, and values do not expire.
    Values that expire from now on, or by another clock, count as written at `stamp_ms`.
    """
    is_stamped = declaration.ttl is not None
    at: pa.Array | None = None
    old = None if held is None else TTL.of(held.ttl)
    if held is not None and old is not None:
        keeps_times = declaration.ttl is not None and declaration.ttl.clock == old.clock
        if keeps_times and _equal(parse_type(held.type), declaration.type):
            return batch
        times, plain = split_stamps(batch["value"])
        # Times of one clock mean nothing by the other: an old event may have been written just now.
        at = times if keeps_times else None
        batch = batch.set_column(batch.schema.names.index("value"), "value", plain)
    rows = _reshape_values(batch, declaration, key_type, operator, held)
    if not is_stamped:
        return rows
    at = _same_stamp(rows["value"], stamp_ms) if at is None else at
    stamped = join_stamps(at, rows["value"], rows["live"])
    return rows.set_column(rows.schema.names.index("value"), "value", stamped)


def _same_stamp(values: pa.Array, stamp_ms: int) -> pa.Array:
    if not pa.types.is_list(values.type):
        return pa.array(np.full(len(values), stamp_ms, np.int64))
    offsets, items, nulls = list_parts(values)
    stamps = pa.array(np.full(len(items), stamp_ms, np.int64))
    return pa.ListArray.from_arrays(offsets, stamps, mask=nulls)


def _reshape_values(
    batch: pa.RecordBatch,
    declaration: Declaration,
    key_type: pa.DataType,
    operator: str,
    held: StateDecl | None,
) -> pa.RecordBatch:
    """Return rows of plain values, in the declared type."""
    values = batch["value"]
    items = values.type.value_type if declaration.kind == "list" else values.type
    old = parse_type(items if held is None else held.type)
    new_arrow = codec(declaration.type).arrow
    if _equal(old, declaration.type) or (held is None and _equal(old, new_arrow)):
        return batch
    columns = {name: batch[name] for name in batch.schema.names}
    if declaration.migrate is not None:
        columns |= _migrate_values(batch, old, declaration, key_type, operator)
    elif declaration.kind == "list":
        columns["value"] = _cast(values, pa.list_(new_arrow))
    else:
        columns["value"] = _cast(values, new_arrow)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _cast(array: pa.Array, type: pa.DataType) -> pa.Array:
    """Cast to a type that `_check` has accepted."""
    types = pa.types
    if array.type == type:
        return array
    if types.is_struct(type):
        at = {field.name: index for index, field in enumerate(array.type)}
        children = [
            _cast(array.field(at[field.name]), field.type)
            if field.name in at
            else pa.nulls(len(array), field.type)
            for field in type
        ]
        validity = None
        if array.null_count:
            bits = np.packbits(array.is_valid().to_numpy(zero_copy_only=False), bitorder="little")
            validity = pa.py_buffer(bits)
        # Not from_arrays: under a null struct a NOT NULL field may hold anything.
        return pa.StructArray.from_buffers(type, len(array), [validity], children=children)
    if types.is_list(type):
        offsets, items, nulls = list_parts(array)
        return pa.ListArray.from_arrays(
            offsets, _cast(items, type.value_type), type=type, mask=nulls
        )
    if types.is_map(type):
        # Arrow's MapArray ignores that it is a slice; the list it is made of does not.
        entry = pa.struct([array.type.key_field, array.type.item_field])
        entries = array.cast(pa.list_(pa.field("entries", entry, nullable=False)))
        offsets, pairs, nulls = list_parts(entries)
        return pa.MapArray.from_arrays(
            offsets,
            _cast(pairs.field(0), type.key_type),
            _cast(pairs.field(1), type.item_type),
            type=type,
            mask=nulls,
        )
    return array.cast(type)


def _migrate_values(
    batch: pa.RecordBatch,
    old: pa.DataType,
    declaration: Declaration,
    key_type: pa.DataType,
    operator: str,
) -> dict[str, pa.Array]:
    """Return the columns that change when the user's function converts each value."""
    values, new = batch["value"], codec(declaration.type)
    if declaration.kind != "list":
        rows = range(len(batch))
        found = _call_migrate(batch, values, rows, old, declaration, key_type, operator)
        live = batch["live"].to_numpy(zero_copy_only=False)
        was = values.is_valid().to_numpy(zero_copy_only=False)
        dropped = np.fromiter((value is None for value in found), bool, len(found)) & was
        # In a map a stored None is a value and stays one.
        return {"value": new.encode(found), "live": pa.array(live & ~dropped)}
    offsets, items, nulls = list_parts(values)
    lengths = np.diff(offsets.to_numpy())
    owners = np.repeat(np.arange(len(batch)), lengths).tolist()
    found = _call_migrate(batch, items, owners, old, declaration, key_type, operator)
    encoded = new.encode(found)
    return {"value": pa.ListArray.from_arrays(offsets, encoded, mask=nulls)}


def _call_migrate(
    batch: pa.RecordBatch,
    values: pa.Array,
    rows: Sequence[int],
    old: pa.DataType,
    declaration: Declaration,
    key_type: pa.DataType,
    operator: str,
) -> Values:
    """Return the function's results, checked; None for dropped values and for None."""
    migrate, new, before = declaration.migrate, codec(declaration.type), codec(old)
    assert migrate is not None
    is_list = declaration.kind == "list"
    answers: Values = []
    for row, stored in zip(rows, before.decode(values), strict=True):
        if stored is None:
            answers.append(None)
            continue
        value = stored
        try:
            value = before.restore(stored)
            answer = migrate(value)
            if answer is None and is_list:
                raise TypeError("it returned None, but an item of a list cannot be dropped")
            answers.append(None if answer is None else new.normalise(answer))
        except Exception as error:
            key = codec(key_type).decode_keys(batch["key"].slice(row, 1))[0]
            raise _migration_error(error, declaration, operator, key, value) from error
    return answers


def _migration_error(
    error: Exception, declaration: Declaration, operator: str, key: object, value: object
) -> FunctionError:
    state = declaration.name
    facts = {"key": _REPR.repr(key), "value": _REPR.repr(value)}
    text = f"{type(error).__name__}: {error}"[:_MESSAGE_CHARS_MAX]
    lines = [
        f"migrate= of state {state!r} of operator {operator!r} failed with {text}",
        f"  key: {facts['key']}",
        f"  value: {facts['value']}",
    ]
    at = find_raise(error, declaration.migrate)
    if at is not None:
        facts["at"] = at
        lines.append(f"  at: {at}")
    return FunctionError("\n".join(lines), operator=operator, state=state, cause=text, **facts)
