"""Nexmark: the questions of an auction house, each in a few lines.

    python bench/nexmark.py --write events
    cairn run examples/nexmark.py:build --checkpoint ckpt -- q5 events/parquet out

People register, put items up for auction, and bid. `events` has a folder of files for each of
`people`, `auctions` and `bids`; the answer is written to `out`, each row exactly once.

The numbers are those of the original. Four are missing: q6, which asks for more than Flink SQL can
answer; q10, whose answer is files and no rows (see `sinks.Files`); q12, which asks by the clock;
and q13, which needs a table beside the events.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from cairn import Job, Stream, sinks, windows

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TABLES = {
    "people": "id long, name string, email string, credit_card string, city string, state string, "
    "date_time timestamp, extra string",
    "auctions": "id long, item_name string, description string, initial_bid long, reserve long, "
    "date_time timestamp, expires timestamp, seller long, category long, extra string",
    "bids": "auction long, bidder long, price long, channel string, url string, "
    "date_time timestamp, extra string",
}
WATERMARK = "4 seconds"

BID = ("auction", "bidder", "price", "date_time", "extra")
NAMES = {
    "count(*)": "bids",
    "count(distinct bidder)": "bidders",
    "count(distinct auction)": "auctions",
}
REPORT = tuple(NAMES)
RANGES = {
    "total": "",
    "rank1": " filter (where price < 10000)",
    "rank2": " filter (where price >= 10000 and price < 1000000)",
    "rank3": " filter (where price >= 1000000)",
}


def q0(bids: Stream) -> Stream:
    """All bids, as they are."""
    return bids.transform(select(*BID))


def q1(bids: Stream) -> Stream:
    """What are the prices in euros?"""
    return bids.transform(
        select("auction", "bidder", "0.908 * price as price", "date_time", "extra")
    )


def q2(bids: Stream) -> Stream:
    """What is bid on every 123rd auction?"""
    return bids.transform(select("auction", "price", where="auction % 123 = 0"))


def q3(auctions: Stream, people: Stream) -> Stream:
    """Who sells items of category 10 in Oregon, Idaho or California, and in which auctions?"""
    selling = auctions.transform(select("id", "seller", where="category = 10"))
    local = people.transform(
        select("id", "name", "city", "state", where="state in ('OR', 'ID', 'CA')")
    )
    return selling.join(local, on={"seller": "id"}, uid="q3").transform(
        select("name", "city", "state", "id")
    )


def q4(bids: Stream, auctions: Stream) -> Stream:
    """What is the average price of the winning bids, in each category?"""
    prices = bids.transform(select("auction", "price", "date_time"))
    items = auctions.transform(select("id", "category", "date_time", "expires"))
    winning = (
        prices.join_as_of(items, on={"auction": "id"}, valid_until="expires", uid="q4-bids")
        .key_by("auction", "category")
        .aggregate(final="max(price)", changes=True, uid="q4-winning")
    )
    return winning.key_by("category").aggregate(price="avg(final)", uid="q4")


def q5(bids: Stream) -> Stream:
    """Which auctions had the most bids in the last ten seconds, every two seconds?"""
    counts = (
        bids.key_by("auction")
        .window(windows.sliding("10 seconds", "2 seconds"))
        .aggregate(num="count(*)", uid="q5-counts")
    )
    most = counts.window(windows.tumbling("2 seconds")).aggregate(num="max(num)", uid="q5-most")
    return counts.join(most, on=["window_end", "num"], within="0 seconds", uid="q5").transform(
        select("auction", "num", "window_end")
    )


def q7(bids: Stream) -> Stream:
    """What is the highest bid in each ten seconds?"""
    return (
        bids.window(windows.tumbling("10 seconds"))
        .aggregate(bid=f"max_by(struct({', '.join(BID)}), price)", uid="q7")
        .transform(select("bid.*"))
    )


def q8(people: Stream, auctions: Stream) -> Stream:
    """Who registered and put an item up for auction in the same ten seconds?"""
    starts = "window(date_time, '10 seconds').start as starts"
    new = people.transform(select("id", "name", "date_time", starts))
    selling = auctions.transform(select("seller", "date_time", starts))
    sellers = selling.deduplicate(on=["seller", "starts"], within="10 seconds", uid="q8-sellers")
    return new.join(
        sellers, on={"id": "seller", "starts": "starts"}, within="10 seconds", uid="q8"
    ).transform(select("id", "name", "starts"))


def q9(bids: Stream, auctions: Stream) -> Stream:
    """Which bid wins each auction: the highest, and of equal ones the first?"""
    return (
        q0(bids)
        .join_as_of(auctions, on={"auction": "id"}, valid_until="expires", uid="q9-bids")
        .top(1, by=["price desc", "date_time"], per="auction", uid="q9")
        .transform(lambda rows: rows.where("rank = 1").drop("rank"))
    )


def q11(bids: Stream) -> Stream:
    """How many bids did each person make while active? Ten seconds without a bid end that."""
    return (
        bids.key_by("bidder")
        .window(windows.session("10 seconds"))
        .aggregate(bid_count="count(*)", uid="q11")
    )


def q14(bids: Stream) -> Stream:
    """Which bids are between 10,000 and 500,000 euros, at which time of day?"""
    time_of_day = """
        case when hour(date_time) between 8 and 18 then 'dayTime'
             when hour(date_time) <= 6 or hour(date_time) >= 20 then 'nightTime'
             else 'otherTime' end as bid_time_type"""
    count_c = "length(extra) - length(replace(extra, 'c', '')) as c_counts"
    return bids.transform(
        select(
            "auction",
            "bidder",
            "0.908 * price as price",
            time_of_day,
            "date_time",
            "extra",
            count_c,
            where="0.908 * price > 1000000 and 0.908 * price < 50000000",
        )
    )


def q15(bids: Stream) -> Stream:
    """How many bids, bidders and auctions are there on a day, in three ranges of price?"""
    return bids.key_by(day()).aggregate(**by_price(*REPORT), uid="q15")


def q16(bids: Stream) -> Stream:
    """The same for each channel, and when was its last bid?"""
    minute = "max(date_format(date_time, 'HH:mm'))"
    return bids.key_by("channel", day()).aggregate(minute=minute, **by_price(*REPORT), uid="q16")


def q17(bids: Stream) -> Stream:
    """How many bids did an auction get on a day, in three ranges of price, and of what price?"""
    return bids.key_by("auction", day()).aggregate(
        **by_price("count(*)"),
        min_price="min(price)",
        max_price="max(price)",
        avg_price="avg(price)",
        sum_price="sum(price)",
        uid="q17",
    )


def q18(bids: Stream) -> Stream:
    """What is the last bid of each person in each auction?"""
    return bids.key_by("bidder", "auction").latest(uid="q18")


def q19(bids: Stream) -> Stream:
    """What are the ten highest bids of each auction?"""
    return bids.top(10, by="price desc", per="auction", uid="q19")


def q20(bids: Stream, auctions: Stream) -> Stream:
    """Which bids are for items of category 10, and which items are these?"""
    chosen = auctions.transform(select("*", where="category = 10"))
    return bids.join(chosen, on={"auction": "id"}, uid="q20")


def q21(bids: Stream) -> Stream:
    """What is the id of each bid's channel?"""
    in_url = "regexp_extract(url, '(&|^)channel_id=([^&]*)', 2)"
    channel_id = f"""
        case lower(channel) when 'apple' then '0' when 'google' then '1'
             when 'facebook' then '2' when 'baidu' then '3' else {in_url} end as channel_id"""
    known = "lower(channel) in ('apple', 'google', 'facebook', 'baidu')"
    return bids.transform(
        select(
            "auction", "bidder", "price", "channel", channel_id, where=f"{known} or {in_url} != ''"
        )
    )


def q22(bids: Stream) -> Stream:
    """What are the first three folders of each bid's url?"""
    folders = [f"split(url, '/')[{n + 2}] as dir{n}" for n in (1, 2, 3)]
    return bids.transform(select("auction", "bidder", "price", "channel", *folders))


def select(*columns: str, where: str = "true") -> Callable[[DataFrame], DataFrame]:
    """Return the step "select columns where ..." for `.transform`."""
    return lambda rows: rows.where(where).selectExpr(*columns)


def day() -> Column:
    return F.date_format("date_time", "yyyy-MM-dd").alias("day")


def by_price(*counts: str) -> dict[str, Any]:
    """Return counts of all bids, and of those in each of three ranges of price."""
    return {
        f"{name}_{NAMES[count]}": f"{count}{where}"
        for count in counts
        for name, where in RANGES.items()
    }


QUERIES: dict[str, Callable[..., Stream]] = {
    name: query for name, query in list(globals().items()) if name[0] == "q" and name[1:].isdigit()
}


def tables_of(query: str) -> list[str]:
    """Return the names of the tables that a query reads."""
    return list(inspect.signature(QUERIES[query]).parameters)


def ask(job: Job, query: str, tables: dict[str, DataFrame]) -> Stream:
    """Add a query over these tables to the job; return its answer."""
    return QUERIES[query](
        **{
            name: job.source(name, tables[name], event_time="date_time", watermark=WATERMARK)
            for name in tables_of(query)
        }
    )


def build(spark: SparkSession, query: str, events: str, out_dir: str) -> Job:
    """Return the job for `cairn run`: a query over the files in `events`, written to `out_dir`."""
    tables = {
        name: spark.readStream.schema(TABLES[name]).parquet(f"{events}/{name}")
        for name in tables_of(query)
    }
    job = Job(query)
    ask(job, query, tables).sink_to(sinks.Files(out_dir), uid="out")
    return job
