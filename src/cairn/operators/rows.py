"""Plain Python functions over rows: the operators behind `.map`, `.filter` and `.flat_map`.

They have no state and no time: a row is theirs wherever it is, and however late it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from cairn.functions import Hooks, Process

RowKind = Literal["map", "filter", "flat_map"]


class RowFunction(Hooks, Process[Any]):
    """Calls a function of one argument, the row."""

    called: ClassVar[str]
    ignores_time: bool = True

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def process(self, row: Any, ctx: object) -> Any:
        raise NotImplementedError


class MapRows(RowFunction):
    """Emits the row that the function returns."""

    called: ClassVar[str] = "map"

    def process(self, row: Any, ctx: object) -> Any:
        result = self.function(row)
        if not isinstance(result, tuple | dict) and not hasattr(result, "__dataclass_fields__"):
            raise TypeError(
                f"the function returned {type(result).__name__}; expected a row (tuple, dict, row "
                "object). Use .filter to drop rows, .flat_map to return several"
            )
        return result


class FilterRows(RowFunction):
    """Emits the rows for which the function returns something true."""

    called: ClassVar[str] = "filter"

    def process(self, row: Any, ctx: object) -> Any:
        return row if self.function(row) else None


class FlatMapRows(RowFunction):
    """Emits the rows that the function returns or yields: none, one or several."""

    called: ClassVar[str] = "flat_map"

    def process(self, row: Any, ctx: object) -> Any:
        return self.function(row)


ROW_FUNCTIONS: dict[RowKind, type[RowFunction]] = {
    "map": MapRows,
    "filter": FilterRows,
    "flat_map": FlatMapRows,
}
