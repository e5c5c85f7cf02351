"""Keys and rows in PostgreSQL's binary format: psycopg would take a hundred times as long.

An array is `dimensions, has nulls, type, length, lower bound`, then each element with its length. A
row of COPY is the number of its fields, then each field with its length; -1 stands for null.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cairn.backends.cached.database import Op
from cairn.backends.cached.numbers import PREFIX

if TYPE_CHECKING:
    from psycopg import Connection

_HEAD: Final = struct.Struct(">iiIii")
_LENGTH: Final = struct.Struct(">i")
_LENGTHS: Final = tuple(_LENGTH.pack(length) for length in range(1024))
_NULL: Final = _LENGTH.pack(-1)
_COPY_HEAD: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END: Final = b"\xff\xff"
_GROUP: Final = struct.pack(">hi", 5, 2)
_STATE: Final = _LENGTH.pack(4)


class Int2Array(bytes):
    oid, element = 1005, 21


class Int4Array(bytes):
    oid, element = 1007, 23


class BytesArray(bytes):
    oid, element = 1001, 17


def register(connection: Connection[Any]) -> None:
    """Let these arrays be parameters of statements."""
    from psycopg.adapt import Dumper
    from psycopg.pq import Format

    for kind in (Int2Array, Int4Array, BytesArray):

        class Raw(Dumper):
            format = Format.BINARY
            oid = kind.oid

            def dump(self, obj: Any) -> bytes:
                return bytes(obj)

        connection.adapters.register_dumper(kind, Raw)


def split_keys(keys: Sequence[bytes]) -> tuple[Int2Array, Int4Array, BytesArray]:
    """Return key groups, numbers of states and names of keys."""
    heads = np.frombuffer(
        b"".join([key[: PREFIX.size] for key in keys]), [("group", ">i2"), ("state", ">i4")]
    )
    count = len(keys)
    names = [key[PREFIX.size :] for key in keys]
    body = b"".join([_length(len(name)) + name for name in names])
    return (
        Int2Array(_numbers(Int2Array.element, heads["group"], 2)),
        Int4Array(_numbers(Int4Array.element, heads["state"], 4)),
        BytesArray(_HEAD.pack(1, 0, BytesArray.element, count, 1) + body),
    )


def _numbers(element: int, values: np.ndarray[Any, Any], width: int) -> bytes:
    items = np.empty(len(values), [("length", ">i4"), ("value", f">i{width}")])
    items["length"] = width
    items["value"] = values
    return _HEAD.pack(1, 0, element, len(values), 1) + items.tobytes()


def copy_rows(ops: Iterable[Op], epoch: int) -> bytes:
    """Return rows (key group, state, name, epoch, value) for COPY … (FORMAT binary)."""
    parts = [_COPY_HEAD]
    of_epoch = struct.pack(">iq", 8, epoch)
    for key, value in ops:
        name = key[PREFIX.size :]
        parts += (_GROUP, key[:2], _STATE, key[2 : PREFIX.size], _length(len(name)), name, of_epoch)
        parts += (_NULL,) if value is None else (_length(len(value)), value)
    parts.append(_COPY_END)
    return b"".join(parts)


def _length(length: int) -> bytes:
    return _LENGTHS[length] if length < len(_LENGTHS) else _LENGTH.pack(length)
