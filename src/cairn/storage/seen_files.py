"""The log of files that Spark's file source has read, cut where a new query continues.

    <n>            the files of listing n: a header and a line of JSON for each file
    <n>.compact    the files of all listings up to n; one every `interval` listings

The interval is a setting, and Spark does not store it. Spark derives it from the distance of the
last two compact files. With one compact file it uses a divisor of its number close to the
setting, without any it uses the setting. Then it expects the last compact file, and every file
after it, at the numbers that follow from the interval. So a cut log ends with the two compact
files that define its interval, and Spark reads it with any setting. A log that is too short for
two of them is laid out for the setting, if that is known.

Always true here:
- Spark reads exactly the lines up to the cut;
- lines whose file Spark has cleaned up come from a later compact file, or the log is not cut.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final

COMPACT: Final = ".compact"
DEFAULT_INTERVAL: Final = 10
"""Spark's default of spark.sql.streaming.fileSource.log.compactInterval."""


def cut_file_log(
    log: Mapping[str, bytes], last: int, setting: int | None = None
) -> dict[str, bytes] | None:
    """Return the log as it was after file `last`; None if earlier lines are lost.

    `setting` is the interval that the next query is started with; by default the one that the log
    was written with.
    """
    compacts = sorted(int(name.removesuffix(COMPACT)) for name in log if name.endswith(COMPACT))
    before = max((number for number in compacts if number <= last), default=-1)
    names = _names(before, last)
    interval = _interval(compacts, last)
    is_whole = all(name in log for name in names)
    if is_whole:
        found = [log[name] for name in names]
    else:
        later = [number for number in compacts if number >= last]
        if not later:
            return None
        found = [log[f"{later[0]}{COMPACT}"]]
        interval = interval or _guess_interval(later[0])
    is_short = interval is None or _last_compact(last, interval) < interval
    if is_short and setting is not None:
        interval = setting
    if is_whole and (interval is None or before == _last_compact(last, interval)):
        cut, head = dict(zip(names, found, strict=True)), _lines(found[0])[0]
    else:
        assert interval is not None
        before = _last_compact(last, interval)
        cut, head = _lay_out(found, _names(before, last), last)
    if interval is not None and before >= interval:
        # Spark reads only its name.
        name = f"{before - interval}{COMPACT}"
        cut[name] = log.get(name, head.encode())
    return cut


def lay_out_list(lines: Sequence[str], last: int, setting: int | None) -> dict[str, bytes]:
    """Return the files of a log with these lines, up to file `last`.

    All lines are in the first file: Spark reads the files of a log as one.
    """
    interval = setting or DEFAULT_INTERVAL
    before = _last_compact(last, interval)
    names = _names(before, last)
    files = dict.fromkeys(names, b"v1")
    files[names[0]] = "\n".join(["v1", *lines]).encode()
    if before >= interval:
        # Spark reads only its name.
        files[f"{before - interval}{COMPACT}"] = b"v1"
    return files


def find_missing_file(names: Collection[str], last: int, setting: int) -> str | None:
    """Return a file that Spark expects with this setting but does not find; None if all exist.

    A log that is too short for two compact files may have been laid out for another setting.
    """
    compacts = sorted(int(name.removesuffix(COMPACT)) for name in names if name.endswith(COMPACT))
    interval = _interval_spark_finds(compacts, setting)
    needed = _names(_last_compact(last, interval), last)
    return next((name for name in needed if name not in names), None)


def _interval_spark_finds(compacts: Sequence[int], setting: int) -> int:
    """Return the interval as Spark's CompactibleFileStreamLog derives it."""
    if not compacts:
        return setting
    if len(compacts) > 1:
        return compacts[-1] - compacts[-2]
    count = compacts[0] + 1
    if setting >= count // 2:
        return count
    divisors = (n for n in range(setting, count // 2 + 1) if count % n == 0)
    return next(divisors, count)


def _lay_out(found: list[bytes], names: list[str], last: int) -> tuple[dict[str, bytes], str]:
    """Return these files, the first with all lines up to `last`; and the header."""
    head, kept = "", []
    for data in found:
        head, *lines = _lines(data)
        kept += [line for line in lines if json.loads(line).get("batchId", 0) <= last]
    cut = {name: head.encode() for name in names}
    cut[names[0]] = "\n".join([head, *kept]).encode()
    return cut, head


def _lines(data: bytes) -> list[str]:
    return [line for line in data.decode().split("\n") if line]


def _names(before: int, last: int) -> list[str]:
    """Return the names of the compact file `before`, if any, and of every file after it."""
    names = [str(number) for number in range(before + 1, last + 1)]
    return names if before < 0 else [f"{before}{COMPACT}", *names]


def _last_compact(last: int, interval: int) -> int:
    """Return the number of the last compact file up to `last`; -1 before the first."""
    return (last + 1) // interval * interval - 1


def _interval(compacts: list[int], last: int) -> int | None:
    """Return the distance of the two compact files around `last`, or of those next to it."""
    if len(compacts) < 2:
        return None
    after = sum(number <= last for number in compacts)
    right = min(max(after, 1), len(compacts) - 1)
    return compacts[right] - compacts[right - 1]


def _guess_interval(only: int) -> int:
    """Return the interval of a log with one compact file: a divisor, not below the default."""
    count = only + 1
    return next((n for n in range(DEFAULT_INTERVAL, count) if count % n == 0), count)
