"""Rows that a source has and the query has not read, from Spark's progress.

Spark reports the newest offset of some sources beside the one it has read: of Kafka, of the rate
source per micro-batch, of sources with admission control that say it. Other sources, files among
them, report nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def backlog_of(progress: Mapping[str, Any], names: Sequence[str]) -> dict[str, int | None]:
    """Return the rows not yet read of each source; None: Spark does not report it."""
    sources = progress.get("sources") or []
    if len(sources) != len(names):
        return dict.fromkeys(names)
    return {
        name: _behind(source.get("latestOffset"), source.get("endOffset"))
        for name, source in zip(names, sources, strict=True)
    }


def total_backlog(backlog: Mapping[str, int | None]) -> int | None:
    """Return the rows of all sources that report them; None if none does."""
    known = [rows for rows in backlog.values() if rows is not None]
    return sum(known) if known else None


def _behind(latest: Any, read: Any) -> int | None:
    """Return the sum of latest - read over all numbers of two offsets of the same form."""
    latest, read = _parse(latest), _parse(read)
    if isinstance(latest, bool) or isinstance(read, bool):
        return None
    if isinstance(latest, int) and isinstance(read, int):
        return max(0, latest - read)
    if isinstance(latest, Mapping) and isinstance(read, Mapping) and latest:
        # A partition that is new has not been read at all: its first offset is not known.
        parts = [_behind(latest[each], read[each]) for each in latest if each in read]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None
    return None


def _parse(offset: Any) -> Any:
    if not isinstance(offset, str):
        return offset
    try:
        return json.loads(offset)
    except ValueError:
        return None
