"""The answers to the queries of nexmark.py, asked of all events at once in DuckDB.

Answers of a stream are compared with them after its changes are applied: see `settle`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb

RANKS = {
    "rank1": "price < 10000",
    "rank2": "price >= 10000 and price < 1000000",
    "rank3": "price >= 1000000",
}


def _by_rank(what: str) -> str:
    return ", ".join([what, *(f"{what} filter (where {where})" for where in RANKS.values())])


REPORT = ", ".join(
    _by_rank(what) for what in ("count(*)", "count(distinct bidder)", "count(distinct auction)")
)
DAY = "strftime(date_time, '%Y-%m-%d')"
CHANNEL_ID = "regexp_extract(url, '(&|^)channel_id=([^&]*)', 2)"
IN_TIME = (
    "auctions a join bids b on a.id = b.auction and b.date_time between a.date_time and a.expires"
)
_PERIOD = "time_bucket(interval 10 seconds, {})"

SQL = {
    "q0": "select auction, bidder, price, date_time, extra from bids",
    "q1": "select auction, bidder, 0.908 * price, date_time, extra from bids",
    "q2": "select auction, price from bids where auction % 123 = 0",
    "q3": """
        select name, city, state, a.id from auctions a join people p on a.seller = p.id
        where category = 10 and state in ('OR', 'ID', 'CA')""",
    "q4": f"""
        select category, avg(final) from (
            select category, max(price) as final from {IN_TIME} group by a.id, category)
        group by category""",
    "q5": """
        with counts as (
            select auction, count(*) as num, start + interval 10 seconds as until
            from bids, unnest(generate_series(
                time_bucket(interval 2 seconds, date_time) - interval 8 seconds,
                time_bucket(interval 2 seconds, date_time), interval 2 seconds)) as s(start)
            group by auction, start)
        select auction, num, until from counts
        qualify num = max(num) over (partition by until)""",
    "q7": f"""
        select auction, bidder, price, date_time, extra from bids
        qualify price = max(price) over (partition by {_PERIOD.format("date_time")})""",
    "q8": f"""
        select distinct p.id, name, {_PERIOD.format("p.date_time")} as starts
        from people p join auctions a
            on p.id = a.seller
            and {_PERIOD.format("a.date_time")} = {_PERIOD.format("p.date_time")}""",
    "q9": f"""
        select auction, bidder, price, b.date_time, b.extra, item_name, description, initial_bid,
               reserve, a.date_time, expires, seller, category, a.extra
        from {IN_TIME}
        qualify row_number() over (
            partition by a.id order by b.price desc, b.date_time) = 1""",
    "q11": """
        with marked as (
            select bidder, date_time,
                   coalesce(date_time - lag(date_time) over each > interval 10 seconds, true) as new
            from bids window each as (partition by bidder order by date_time)),
        numbered as (
            select bidder, date_time,
                   sum(new::int) over (partition by bidder order by date_time) as session
            from marked)
        select bidder, min(date_time), max(date_time) + interval 10 seconds, count(*)
        from numbered group by bidder, session""",
    "q14": """
        select auction, bidder, 0.908 * price,
               case when hour(date_time) between 8 and 18 then 'dayTime'
                    when hour(date_time) <= 6 or hour(date_time) >= 20 then 'nightTime'
                    else 'otherTime' end,
               date_time, extra, length(extra) - length(replace(extra, 'c', ''))
        from bids where 0.908 * price > 1000000 and 0.908 * price < 50000000""",
    "q15": f"select {DAY}, {REPORT} from bids group by all",
    "q16": f"""
        select channel, {DAY}, max(strftime(date_time, '%H:%M')), {REPORT}
        from bids group by channel, {DAY}""",
    "q17": f"""
        select auction, {DAY}, {_by_rank("count(*)")},
               min(price), max(price), avg(price), sum(price)::bigint
        from bids group by auction, {DAY}""",
    "q18": """
        select auction, bidder, price, channel, url, date_time, extra from bids
        qualify row_number() over (partition by bidder, auction order by date_time desc) = 1""",
    "q19": """
        select *, row_number() over (partition by auction order by price desc) as place
        from bids qualify place <= 10""",
    "q20": """
        select b.*, item_name, description, initial_bid, reserve, a.date_time, expires, seller,
               category, a.extra
        from bids b join auctions a on b.auction = a.id where category = 10""",
    "q21": f"""
        select auction, bidder, price, channel,
               case lower(channel) when 'apple' then '0' when 'google' then '1'
                    when 'facebook' then '2' when 'baidu' then '3' else {CHANNEL_ID} end
        from bids
        where lower(channel) in ('apple', 'google', 'facebook', 'baidu') or {CHANNEL_ID} != ''""",
    "q22": """
        select auction, bidder, price, channel,
               split_part(url, '/', 4), split_part(url, '/', 5), split_part(url, '/', 6)
        from bids""",
}


KEYS = {"q4": 1, "q9": 1, "q15": 1, "q16": 2, "q17": 2, "q18": 2}
"""Queries whose answers change, and the number of key columns: the newest row of a key counts."""
RANKED = "q19"
"""The query whose rows move from rank to rank, in the last column; null: it has none any more."""

Rows = list[tuple[Any, ...]]


def answers(events: Path, queries: Iterable[str]) -> dict[str, Rows]:
    """Return the rows of each query, sorted, for events in Parquet files."""
    with duckdb.connect() as database:
        database.execute("set timezone = 'UTC'")
        for table in ("people", "auctions", "bids"):
            files = f"'{events}/{table}/*.parquet'"
            database.execute(f"create table {table} as from read_parquet({files})")
        found = {query: database.sql(SQL[query]).to_arrow_table() for query in queries}
    return {
        query: in_order(zip(*(column.to_pylist() for column in table.columns), strict=True))
        for query, table in found.items()
    }


def settle(query: str, rows: Iterable[Any]) -> Rows:
    """Return what remains of the rows of a stream when its changes are applied, sorted."""
    if query == RANKED:
        ranks = {tuple(row[:-1]): row for row in rows}
        return in_order(row for row in ranks.values() if row[-1] is not None)
    if query in KEYS:
        return in_order({tuple(row[: KEYS[query]]): row for row in rows}.values())
    return in_order(rows)


def in_order(rows: Iterable[Any]) -> Rows:
    """Return the rows in an order that depends on their values only."""
    return sorted(map(tuple, rows), key=lambda row: tuple(map(str, row)))
