"""Events of an auction house, for nexmark.py: people, auctions, bids.

The generator follows the rules of the original one in its own, vectorised way. Of 50 events one
is a new person, three are new auctions, 46 are bids. Half of the bids go to a hot auction, three
quarters come from a hot bidder, three quarters of the auctions have a hot seller; half of
the bids come through one of four channels. Ids of auctions and people run ahead a little, so a
few bids precede their auction. A person has 200 bytes on average, an auction 500, a bid 100 and
the channel and url.

    events/csv/bids/000000.csv       a file per table and stretch of events
    events/parquet/bids/000000.parquet
    events/halves/bids/0.csv         the same rows in two files, for Flink's two readers

Flink reads the files of a folder in no particular order, which would make most rows late. Two
files, each with every other block of events, keep its readers side by side.

Always true here:
- the events depend on the seed, their number and the rate, and on nothing else;
- times never decrease, and no text has a character that CSV would have to quote.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

Integers = NDArray[np.int64]

PERSON_SHARE, AUCTION_SHARE, BID_SHARE = 1, 3, 46
CYCLE = PERSON_SHARE + AUCTION_SHARE + BID_SHARE
FIRST_PERSON, FIRST_AUCTION, FIRST_CATEGORY = 1000, 1000, 10
CATEGORIES = 5
HOT_EVERY = 100
"""One person and one auction of this many are hot, for a while."""
HOT_AUCTION_RATIO, HOT_SELLER_RATIO, HOT_BIDDER_RATIO, HOT_CHANNEL_RATIO = 2, 4, 4, 2
"""A choice is a hot one but for one time in this many."""
ACTIVE_PEOPLE, OPEN_AUCTIONS, LEAD = 1000, 100, 10
CHANNELS = 10_000
BASE_MS = 1_767_225_600_000  # 2026-01-01
BLOCK = 500
"""Events that go to the same half."""

STATES = ["AZ", "CA", "ID", "OR", "WA", "WY"]
CITIES = [
    *("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland"),
    *("Bend", "Redmond", "Seattle", "Kent", "Cheyenne"),
]
FIRST_NAMES = [
    *("Peter", "Paul", "Luke", "John", "Saul", "Vicky"),
    *("Kate", "Julie", "Sarah", "Deiter", "Walter"),
]
LAST_NAMES = [
    *("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"),
]
HOT_CHANNELS = ["Google", "Facebook", "Baidu", "Apple"]

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
WORDS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz" * 2 + b"    ", np.uint8)
"""Letters and, one time in fourteen, a space."""

TABLES = ("people", "auctions", "bids")
SHARES = dict(zip(TABLES, (PERSON_SHARE, AUCTION_SHARE, BID_SHARE), strict=True))
"""Events of each table in a cycle."""


@dataclass(frozen=True)
class Slab:
    """The rows of a stretch of events, by table, and the number of each row's event."""

    tables: dict[str, pa.Table]
    events: dict[str, Integers]


def slabs(events: int, *, rate: int, seed: int, slab_events: int) -> Iterator[Slab]:
    """Yield the events from first to last, `rate` of them in a second of event time."""
    rng = np.random.default_rng(seed)
    names = _Names(rng)
    for start in range(0, events, slab_events):
        number = np.arange(start, min(start + slab_events, events))
        offset = number % CYCLE
        people = number[offset < PERSON_SHARE]
        auctions = number[(offset >= PERSON_SHARE) & (offset < PERSON_SHARE + AUCTION_SHARE)]
        bids = number[offset >= PERSON_SHARE + AUCTION_SHARE]
        yield Slab(
            {
                "people": _people(rng, people, rate),
                "auctions": _auctions(rng, auctions, rate),
                "bids": _bids(rng, bids, rate, names),
            },
            {"people": people, "auctions": auctions, "bids": bids},
        )


def write_events(
    folder: Path,
    events: int,
    *,
    rate: int,
    seed: int,
    slab_events: int,
    forms: tuple[str, ...] = ("csv", "parquet", "halves"),
) -> dict[str, int]:
    """Write the events in these forms; return the number of rows of each table."""
    for form in forms:
        for table in TABLES:
            (folder / form / table).mkdir(parents=True)
    counts = dict.fromkeys(TABLES, 0)
    with ExitStack() as open_files:
        halves: dict[tuple[str, int], Any] = {}
        everything = slabs(events, rate=rate, seed=seed, slab_events=slab_events)
        for index, slab in enumerate(everything):
            for name, table in slab.tables.items():
                counts[name] += table.num_rows
                if "parquet" in forms:
                    path = folder / "parquet" / name / f"{index:06d}.parquet"
                    # Several row groups, so that all cores read.
                    pq.write_table(table, path, row_group_size=max(1 << 14, table.num_rows // 8))
                    _set_age(path, index)
                text = _as_numbers(table)
                if "csv" in forms:
                    path = folder / "csv" / name / f"{index:06d}.csv"
                    pa.csv.write_csv(text, path, _PLAIN)
                    _set_age(path, index)
                if "halves" in forms:
                    for half in (0, 1):
                        mine = slab.events[name] // BLOCK % 2 == half
                        writer = halves.get((name, half))
                        if writer is None:
                            path = folder / "halves" / name / f"{half}.csv"
                            made = pa.csv.CSVWriter(path, text.schema, write_options=_PLAIN)
                            writer = halves[name, half] = open_files.enter_context(made)
                        writer.write_table(text.filter(pa.array(mine)))
    return counts


def read_tables(folder: Path) -> dict[str, pa.Table]:
    """Return all events that were written as Parquet, by table."""
    return {name: pq.read_table(folder / "parquet" / name) for name in TABLES}


_PLAIN = pa.csv.WriteOptions(include_header=False, quoting_style="none")


def _as_numbers(table: pa.Table) -> pa.Table:
    """Return the table with times as milliseconds: text would be a contest of parsers."""
    for index, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            ms = pc.divide(table[index].cast(pa.int64()), 1000)
            table = table.set_column(index, field.name, ms)
    return table


def _set_age(path: Path, index: int) -> None:
    # The file source takes files in order of their age.
    os.utime(path, (1_700_000_000 + index, 1_700_000_000 + index))


def _people(rng: np.random.Generator, number: Integers, rate: int) -> pa.Table:
    count = len(number)
    name = pc.binary_join_element_wise(
        _choose(rng, FIRST_NAMES, count), _choose(rng, LAST_NAMES, count), " "
    )
    email = pc.binary_join_element_wise(
        _texts(rng, LETTERS, rng.integers(3, 7, count)),
        pc.binary_join_element_wise(_texts(rng, LETTERS, rng.integers(3, 5, count)), "com", "."),
        "@",
    )
    card = pc.binary_join_element_wise(*(_digits(rng, count) for _ in range(4)), " ")
    city, state = _choose(rng, CITIES, count), _choose(rng, STATES, count)
    size = 16 + sum(_lengths(text) for text in (name, email, card, city, state))
    return pa.table(
        {
            "id": number // CYCLE + FIRST_PERSON,
            "name": name,
            "email": email,
            "credit_card": card,
            "city": city,
            "state": state,
            "date_time": _times(_event_ms(number, rate)),
            "extra": _extra(rng, size, 200),
        }
    )


def _auctions(rng: np.random.Generator, number: Integers, rate: int) -> pa.Table:
    count = len(number)
    people = number // CYCLE + 1
    seller = np.where(
        rng.integers(0, HOT_SELLER_RATIO, count) > 0,
        (people - 1) // HOT_EVERY * HOT_EVERY,
        _active_person(rng, people),
    )
    at = _event_ms(number, rate)
    # On average as long as it takes until as many auctions have begun as are open at a time.
    horizon_ms = OPEN_AUCTIONS * CYCLE * 1000 / (AUCTION_SHARE * rate)
    expires = at + 1 + rng.integers(0, max(int(2 * horizon_ms), 1), count)
    item = _trim(_texts(rng, WORDS, rng.integers(3, 20, count)))
    description = _trim(_texts(rng, WORDS, rng.integers(3, 100, count)))
    initial = _prices(rng, count)
    return pa.table(
        {
            "id": _last_auction(number) + FIRST_AUCTION,
            "item_name": item,
            "description": description,
            "initial_bid": initial,
            "reserve": initial + _prices(rng, count),
            "date_time": _times(at),
            "expires": _times(expires),
            "seller": seller + FIRST_PERSON,
            "category": FIRST_CATEGORY + rng.integers(0, CATEGORIES, count),
            "extra": _extra(rng, 56 + _lengths(item) + _lengths(description), 500),
        }
    )


def _bids(rng: np.random.Generator, number: Integers, rate: int, names: _Names) -> pa.Table:
    count = len(number)
    last = _last_auction(number)
    oldest = np.maximum(last - OPEN_AUCTIONS, 0)
    auction = np.where(
        rng.integers(0, HOT_AUCTION_RATIO, count) > 0,
        last // HOT_EVERY * HOT_EVERY,
        rng.integers(oldest, last + 1 + LEAD),
    )
    people = number // CYCLE + 1
    bidder = np.where(
        rng.integers(0, HOT_BIDDER_RATIO, count) > 0,
        # The second one: hot bidders are not hot sellers.
        (people - 1) // HOT_EVERY * HOT_EVERY + 1,
        _active_person(rng, people),
    )
    channel = np.where(
        rng.integers(0, HOT_CHANNEL_RATIO, count) > 0,
        CHANNELS + rng.integers(0, len(HOT_CHANNELS), count),
        rng.integers(0, CHANNELS, count),
    )
    return pa.table(
        {
            "auction": auction + FIRST_AUCTION,
            "bidder": bidder + FIRST_PERSON,
            "price": _prices(rng, count),
            "channel": names.channels.take(pa.array(channel)),
            "url": names.urls.take(pa.array(channel)),
            "date_time": _times(_event_ms(number, rate)),
            "extra": _extra(rng, np.full(count, 32), 100),
        }
    )


class _Names:
    """Channels and their urls. The hot channels come last; of the others nine in ten have an id."""

    def __init__(self, rng: np.random.Generator) -> None:
        count = CHANNELS + len(HOT_CHANNELS)
        parts = [_texts(rng, LETTERS, rng.integers(3, 6, count)) for _ in range(3)]
        page = pc.binary_join_element_wise(
            "https://www.nexmark.com", *parts, "item.htm?query=1", "/"
        ).to_pylist()
        has_id = rng.random(CHANNELS) < 0.9
        for index in np.flatnonzero(has_id):
            page[index] += f"&channel_id={int(f'{index:016b}'[::-1], 2)}"
        self.channels = pa.array([f"channel-{i}" for i in range(CHANNELS)] + HOT_CHANNELS)
        self.urls = pa.array(page)


def _event_ms(number: Integers, rate: int) -> Integers:
    return BASE_MS + number * 1000 // rate


def _last_auction(number: Integers) -> Integers:
    """Return the newest auction as of each auction or bid, counted from 0."""
    within = np.minimum(number % CYCLE - PERSON_SHARE, AUCTION_SHARE - 1)
    return number // CYCLE * AUCTION_SHARE + within


def _active_person(rng: np.random.Generator, people: Integers) -> Integers:
    active = np.minimum(people, ACTIVE_PEOPLE)
    return people - active + rng.integers(0, active + LEAD)


def _prices(rng: np.random.Generator, count: int) -> Integers:
    """Return cents between a dollar and a million, even on a logarithmic scale."""
    return np.round(10 ** (rng.random(count) * 6) * 100).astype(np.int64)


def _times(ms: Integers) -> pa.Array:
    return pa.array(ms * 1000).cast(pa.timestamp("us", "UTC"))


def _choose(rng: np.random.Generator, values: list[str], count: int) -> pa.Array:
    return pa.array(values).take(pa.array(rng.integers(0, len(values), count)))


def _digits(rng: np.random.Generator, count: int) -> pa.Array:
    return pc.utf8_lpad(pa.array(rng.integers(0, 10_000, count)).cast(pa.string()), 4, "0")


def _texts(rng: np.random.Generator, alphabet: NDArray[np.uint8], lengths: Integers) -> pa.Array:
    """Return random texts of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    drawn = np.frombuffer(rng.bytes(int(offsets[-1])), np.uint8)
    # 256 is no multiple of the alphabet's size; letters need not be quite equally likely.
    data = alphabet[np.arange(256) % len(alphabet)][drawn]
    return pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(data))


def _trim(texts: pa.Array) -> pa.Array:
    return pc.utf8_trim_whitespace(texts)


def _lengths(texts: pa.Array) -> Integers:
    found: Integers = pc.binary_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _extra(rng: np.random.Generator, size: Integers, average: int) -> pa.Array:
    """Return texts that bring rows of these sizes to the average, give or take a fifth."""
    missing = np.maximum(average - size, 0)
    spread = np.round(missing * 0.2).astype(np.int64)
    return _texts(rng, LETTERS, missing - spread + rng.integers(0, np.maximum(2 * spread, 1)))
