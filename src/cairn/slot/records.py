"""A function called row by row, with the context and the state handles set to the row's key.

This loop is the hottest code there is: a microsecond here is a second per million rows.

Always true here:
- rows are processed in the order they come, and what they cause is emitted in that order;
- what a batch caused has left the slot before the next batch is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice, repeat
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cairn.backends.base import Backend
from cairn.codec import codec
from cairn.errors import FunctionError
from cairn.functions import KeyedProcess
from cairn.slot.outlet import short
from cairn.types import row_class

if TYPE_CHECKING:
    from cairn.slot.operator import Operator


class RecordRunner:
    """Runs a KeyedProcess."""

    def __init__(self, operator: Operator, function: KeyedProcess[Any]) -> None:
        self._operator = operator
        self._function = function
        self.handles_late = function.handles_late
        spec = operator.spec
        self._row = partial(tuple.__new__, row_class(spec.schema))
        self._columns = [codec(field.type) for field in spec.schema]
        self._key_at = [spec.schema.names.index(name) for name in spec.keys]
        self._key_codecs = [codec(spec.schema.field(name).type) for name in spec.keys]
        self._key = partial(tuple.__new__, row_class(spec.keys))
        self._prefetches = type(operator.backend).prefetch is not Backend.prefetch

    def begin_rows(self) -> None:
        pass

    def run(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> None:
        columns = [
            column.decode(array)
            for column, array in zip(self._columns, rows.flatten(), strict=True)
        ]
        group_list = groups.to_numpy().tolist()
        times_ms: Iterable[int | None] = repeat(None)
        if times is not None:
            times_ms = np.floor_divide(times.to_numpy(), 1000).tolist()
            if self._function.reads_times_us:
                self._operator.context.times_us = iter(times.to_numpy().tolist())
        row_tuples = map(self._row, zip(*columns, strict=True))
        keys = self._keys(columns, rows)
        operator = self._operator
        if self._prefetches:
            keys = list(keys)
            operator.backend.prefetch(group_list, keys)
        scoped = zip(group_list, keys, times_ms, row_tuples, strict=False)
        context = operator.context
        main = operator.main
        process = self._function.process
        emit = main.rows.append
        row: Any = None
        remaining = len(group_list)
        try:
            while remaining > 0:
                rows_max = main.rows_max
                # The loop assigns straight to the context: the cheapest way to set the scope.
                for context.group, context.key, context.event_time_ms, row in islice(
                    scoped, rows_max
                ):
                    result = process(row, context)
                    if result is None:
                        continue
                    if type(result) is tuple:
                        emit(result)
                    else:
                        self._emit_all(result)
                remaining -= rows_max
                for outlet in operator.outlets:
                    outlet.flush()
        except FunctionError as error:
            raise operator.located(error, row) from error
        except Exception as error:
            raise operator.failed("process()", error, row) from error

    def end_rows(self) -> None:
        pass

    def _keys(self, columns: list[list[Any]], rows: pa.StructArray) -> Iterable[Any]:
        parts = [
            columns[at] if keys.read_keys is keys.read else keys.decode_keys(rows.field(at))
            for at, keys in zip(self._key_at, self._key_codecs, strict=True)
        ]
        return parts[0] if len(parts) == 1 else map(self._key, zip(*parts, strict=True))

    def _emit_all(self, result: Any) -> None:
        """What a function returned when it is not a plain tuple."""
        main = self._operator.main
        out = main.rows
        if type(result) is GeneratorType:
            for row in result:
                out.append(row)
                if len(out) >= main.rows_max:
                    main.flush()
        elif isinstance(result, dict | tuple) or hasattr(result, "__dataclass_fields__"):
            out.append(result)
        elif isinstance(result, str | bytes) or not isinstance(result, Iterable):
            raise TypeError(
                f"process() returned {short(result)}; expected a row (tuple, dict, row object), "
                "an iterable of rows, or None"
            )
        else:
            for row in result:
                main.emit(row)
