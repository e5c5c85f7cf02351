"""Spark's own half of nexmark.py: the queries that its streaming SQL can express.

It cannot express q4, q9 (an aggregate of a join needs a watermark and gives final rows only),
q15, q16 (count of distinct values) and q19 (the ranks within a key).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

WATERMARK = "4 seconds"
PROVIDERS = "org.apache.spark.sql.execution.streaming.state"
STORES = {
    "heap": f"{PROVIDERS}.HDFSBackedStateStoreProvider",
    "rocksdb": f"{PROVIDERS}.RocksDBStateStoreProvider",
}
RANKS = {
    "rank1_bids": "price < 10000",
    "rank2_bids": "price >= 10000 and price < 1000000",
    "rank3_bids": "price >= 1000000",
}
CHANNEL_ID = "regexp_extract(url, '(&|^)channel_id=([^&]*)', 2)"


def q0(bids: DataFrame) -> DataFrame:
    return bids.select("auction", "bidder", "price", "date_time", "extra")


def q1(bids: DataFrame) -> DataFrame:
    return bids.selectExpr("auction", "bidder", "0.908 * price as price", "date_time", "extra")


def q2(bids: DataFrame) -> DataFrame:
    return bids.where("auction % 123 = 0").select("auction", "price")


def q3(auctions: DataFrame, people: DataFrame) -> DataFrame:
    selling = auctions.where("category = 10").select("id", "seller")
    local = people.where("state in ('OR', 'ID', 'CA')")
    local = local.select(F.col("id").alias("person"), "name", "city", "state")
    return selling.join(local, F.expr("seller = person")).select("name", "city", "state", "id")


def q5(bids: DataFrame) -> DataFrame:
    counts = (
        bids.withWatermark("date_time", WATERMARK)
        .groupBy(F.window("date_time", "10 seconds", "2 seconds"), "auction")
        .agg(F.count("*").alias("num"))
    )
    return (
        counts.groupBy("window")
        .agg(F.max("num").alias("most"), F.collect_list(F.struct("auction", "num")).alias("all"))
        .selectExpr("window", "inline(filter(all, one -> one.num = most))")
    )


def q7(bids: DataFrame) -> DataFrame:
    row = F.struct("auction", "bidder", "price", "date_time", "extra")
    return (
        bids.withWatermark("date_time", WATERMARK)
        .groupBy(F.window("date_time", "10 seconds"))
        .agg(F.max_by(row, "price").alias("bid"))
        .select("bid.*")
    )


def q8(people: DataFrame, auctions: DataFrame) -> DataFrame:
    period = F.window("date_time", "10 seconds")
    new = people.withWatermark("date_time", WATERMARK).select("id", "name", period.alias("window"))
    selling = (
        auctions.withWatermark("date_time", WATERMARK)
        .select("seller", period.alias("period"))
        .dropDuplicates(["seller", "period"])
    )
    same = new.join(selling, F.expr("id = seller and window = period"))
    return same.select("id", "name", "window.start")


def q11(bids: DataFrame) -> DataFrame:
    return (
        bids.withWatermark("date_time", WATERMARK)
        .groupBy(F.session_window("date_time", "10 seconds"), "bidder")
        .agg(F.count("*").alias("bid_count"))
    )


def q14(bids: DataFrame) -> DataFrame:
    return bids.where("0.908 * price > 1000000 and 0.908 * price < 50000000").selectExpr(
        "auction",
        "bidder",
        "0.908 * price as price",
        "case when hour(date_time) between 8 and 18 then 'dayTime' "
        "when hour(date_time) <= 6 or hour(date_time) >= 20 then 'nightTime' "
        "else 'otherTime' end as bid_time_type",
        "date_time",
        "extra",
        "length(extra) - length(replace(extra, 'c', '')) as c_counts",
    )


def q17(bids: DataFrame) -> DataFrame:
    return bids.groupBy("auction", F.date_format("date_time", "yyyy-MM-dd").alias("day")).agg(
        F.count("*").alias("total_bids"),
        *(F.count_if(F.expr(where)).alias(name) for name, where in RANKS.items()),
        F.min("price").alias("min_price"),
        F.max("price").alias("max_price"),
        F.avg("price").alias("avg_price"),
        F.sum("price").alias("sum_price"),
    )


def q18(bids: DataFrame) -> DataFrame:
    rest = F.struct("price", "channel", "url", "date_time", "extra")
    newest = bids.groupBy("bidder", "auction").agg(F.max_by(rest, "date_time").alias("bid"))
    return newest.select("auction", "bidder", "bid.*")


def q20(bids: DataFrame, auctions: DataFrame) -> DataFrame:
    chosen = auctions.where("category = 10").withColumnsRenamed(
        {"date_time": "auction_time", "extra": "auction_extra"}
    )
    return bids.join(chosen, F.expr("auction = id")).drop("id")


def q21(bids: DataFrame) -> DataFrame:
    known = "lower(channel) in ('apple', 'google', 'facebook', 'baidu')"
    return bids.where(f"{CHANNEL_ID} != '' or {known}").selectExpr(
        "auction",
        "bidder",
        "price",
        "channel",
        "case lower(channel) when 'apple' then '0' when 'google' then '1' when 'facebook' then '2' "
        f"when 'baidu' then '3' else {CHANNEL_ID} end as channel_id",
    )


def q22(bids: DataFrame) -> DataFrame:
    parts = F.split("url", "/")
    dirs = (parts[index].alias(f"dir{index - 2}") for index in (3, 4, 5))
    return bids.select("auction", "bidder", "price", "channel", *dirs)


QUERIES: dict[str, Callable[..., DataFrame]] = {
    query.__name__: query
    for query in (q0, q1, q2, q3, q5, q7, q8, q11, q14, q17, q18, q20, q21, q22)
}
UPDATES = {"q17", "q18"}
"""Queries whose results change; the others emit final rows."""


def start(query: str, tables: dict[str, Any], checkpoint: str, backend: str) -> Any:
    """Start a query over what is there, with a sink that drops its rows."""
    rows = QUERIES[query](**tables)
    rows.sparkSession.conf.set("spark.sql.streaming.stateStore.providerClass", STORES[backend])
    return (
        rows.writeStream.format("noop")
        .outputMode("update" if query in UPDATES else "append")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
