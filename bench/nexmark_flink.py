"""The Flink half of nexmark.py: the queries in Flink SQL, run in Flink's own environment.

It reads one JSON object per line, runs that query, and prints one: the seconds from submitting
the job to its end, or why Flink refuses the query. The process and its JVM stay for the next
one. It imports nothing of cairn's, and cairn nothing of it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pyflink.table import EnvironmentSettings, TableDescriptor, TableEnvironment

TABLES = {
    "people": "id BIGINT, name STRING, email STRING, credit_card STRING, city STRING, "
    "state STRING, ms BIGINT, extra STRING",
    "auctions": "id BIGINT, item_name STRING, description STRING, initial_bid BIGINT, "
    "reserve BIGINT, ms BIGINT, expires_ms BIGINT, seller BIGINT, category BIGINT, extra STRING, "
    "expires AS CAST(TO_TIMESTAMP_LTZ(expires_ms, 3) AS TIMESTAMP(3))",
    "bids": "auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, ms BIGINT, "
    "extra STRING",
}
BID = "auction, bidder, price, channel, url, date_time, extra"
RANKS = {
    "rank1": "price < 10000",
    "rank2": "price >= 10000 AND price < 1000000",
    "rank3": "price >= 1000000",
}


def by_rank(what: str, name: str) -> str:
    """Return an aggregate of all bids, and of each range of prices."""
    each = (f"{what} FILTER (WHERE {where}) AS {rank}_{name}" for rank, where in RANKS.items())
    return f"{what} AS total_{name}, {', '.join(each)}"


REPORT = ", ".join(
    [
        by_rank("COUNT(*)", "bids"),
        by_rank("COUNT(DISTINCT bidder)", "bidders"),
        by_rank("COUNT(DISTINCT auction)", "auctions"),
    ]
)
IN_TIME = "A.id = B.auction AND B.date_time BETWEEN A.date_time AND A.expires"
PER_AUCTION = """
    SELECT auction, COUNT(*) AS num, window_start, window_end
    FROM HOP(TABLE bids, DESCRIPTOR(date_time), INTERVAL '2' SECOND, INTERVAL '10' SECOND)
    GROUP BY auction, window_start, window_end"""

QUERIES = {
    "q0": "SELECT auction, bidder, price, date_time, extra FROM bids",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bids",
    "q2": "SELECT auction, price FROM bids WHERE MOD(auction, 123) = 0",
    "q3": """
        SELECT P.name, P.city, P.state, A.id FROM auctions A JOIN people P ON A.seller = P.id
        WHERE A.category = 10 AND P.state IN ('OR', 'ID', 'CA')""",
    "q4": f"""
        SELECT category, AVG(final) FROM (
            SELECT MAX(B.price) AS final, A.category FROM auctions A, bids B WHERE {IN_TIME}
            GROUP BY A.id, A.category)
        GROUP BY category""",
    "q5": f"""
        SELECT C.auction, C.num, C.window_end FROM ({PER_AUCTION}) C
        JOIN (
            SELECT MAX(num) AS most, window_start, window_end FROM ({PER_AUCTION})
            GROUP BY window_start, window_end
        ) M
        ON C.window_start = M.window_start AND C.window_end = M.window_end AND C.num >= M.most""",
    "q7": """
        SELECT B.auction, B.bidder, B.price, B.date_time, B.extra FROM bids B
        JOIN (
            SELECT MAX(price) AS highest, window_end
            FROM TUMBLE(TABLE bids, DESCRIPTOR(date_time), INTERVAL '10' SECOND)
            GROUP BY window_start, window_end
        ) M
        ON B.price = M.highest
        WHERE B.date_time BETWEEN M.window_end - INTERVAL '10' SECOND AND M.window_end""",
    "q8": """
        SELECT P.id, P.name, P.window_start
        FROM (
            SELECT id, name, window_start, window_end
            FROM TUMBLE(TABLE people, DESCRIPTOR(date_time), INTERVAL '10' SECOND)
            GROUP BY id, name, window_start, window_end
        ) P
        JOIN (
            SELECT seller, window_start, window_end
            FROM TUMBLE(TABLE auctions, DESCRIPTOR(date_time), INTERVAL '10' SECOND)
            GROUP BY seller, window_start, window_end
        ) A
        ON P.id = A.seller AND P.window_start = A.window_start AND P.window_end = A.window_end""",
    "q9": f"""
        SELECT auction, bidder, price, bid_time, bid_extra, item_name, description, initial_bid,
               reserve, date_time, expires, seller, category, extra
        FROM (
            SELECT A.*, B.auction, B.bidder, B.price, B.date_time AS bid_time,
                   B.extra AS bid_extra,
                   ROW_NUMBER() OVER (
                       PARTITION BY A.id ORDER BY B.price DESC, B.date_time ASC) AS place
            FROM auctions A, bids B WHERE {IN_TIME})
        WHERE place <= 1""",
    "q11": """
        SELECT bidder, window_start, window_end, COUNT(*) AS bid_count
        FROM SESSION(
            TABLE bids PARTITION BY bidder, DESCRIPTOR(date_time), INTERVAL '10' SECOND)
        GROUP BY bidder, window_start, window_end""",
    "q14": """
        SELECT auction, bidder, 0.908 * price AS price,
               CASE WHEN HOUR(date_time) BETWEEN 8 AND 18 THEN 'dayTime'
                    WHEN HOUR(date_time) <= 6 OR HOUR(date_time) >= 20 THEN 'nightTime'
                    ELSE 'otherTime' END AS bid_time_type,
               date_time, extra,
               CHAR_LENGTH(extra) - CHAR_LENGTH(REPLACE(extra, 'c', '')) AS c_counts
        FROM bids WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000""",
    "q15": f"""
        SELECT DATE_FORMAT(date_time, 'yyyy-MM-dd') AS `day`, {REPORT}
        FROM bids GROUP BY DATE_FORMAT(date_time, 'yyyy-MM-dd')""",
    "q16": f"""
        SELECT channel, DATE_FORMAT(date_time, 'yyyy-MM-dd') AS `day`,
               MAX(DATE_FORMAT(date_time, 'HH:mm')) AS `minute`, {REPORT}
        FROM bids GROUP BY channel, DATE_FORMAT(date_time, 'yyyy-MM-dd')""",
    "q17": f"""
        SELECT auction, DATE_FORMAT(date_time, 'yyyy-MM-dd') AS `day`,
               {by_rank("COUNT(*)", "bids")}, MIN(price) AS min_price, MAX(price) AS max_price,
               AVG(price) AS avg_price, SUM(price) AS sum_price
        FROM bids GROUP BY auction, DATE_FORMAT(date_time, 'yyyy-MM-dd')""",
    "q18": f"""
        SELECT {BID} FROM (
            SELECT *, ROW_NUMBER() OVER (
                PARTITION BY bidder, auction ORDER BY date_time DESC) AS place
            FROM bids)
        WHERE place <= 1""",
    "q19": f"""
        SELECT {BID}, place FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC) AS place
            FROM bids)
        WHERE place <= 10""",
    "q20": """
        SELECT auction, bidder, price, channel, url, B.date_time, B.extra, item_name, description,
               initial_bid, reserve, A.date_time, expires, seller, category, A.extra
        FROM bids B JOIN auctions A ON B.auction = A.id WHERE A.category = 10""",
    "q21": """
        SELECT auction, bidder, price, channel,
               CASE LOWER(channel)
                    WHEN 'apple' THEN '0' WHEN 'google' THEN '1'
                    WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
                    ELSE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id
        FROM bids
        WHERE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2) IS NOT NULL
           OR LOWER(channel) IN ('apple', 'google', 'facebook', 'baidu')""",
    "q22": """
        SELECT auction, bidder, price, channel, SPLIT_INDEX(url, '/', 3) AS dir1,
               SPLIT_INDEX(url, '/', 4) AS dir2, SPLIT_INDEX(url, '/', 5) AS dir3
        FROM bids""",
}


def settings(task: dict[str, Any], checkpoints: Path) -> dict[str, str]:
    """Return the settings that Flink's tuning page recommends."""
    conf = {
        "parallelism.default": str(task["parallelism"]),
        "pipeline.object-reuse": "true",
        "table.local-time-zone": "UTC",
        # An embedded cluster has 128 MB of managed memory by default: little for RocksDB.
        "taskmanager.memory.managed.size": "1g",
        "state.backend.type": {"heap": "hashmap", "rocksdb": "rocksdb"}[task["backend"]],
        "execution.checkpointing.interval": f"{task['checkpoint_interval_ms']} ms",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.incremental": "true",
        "execution.checkpointing.dir": checkpoints.as_uri(),
        # Otherwise the end of the input waits for the next checkpoint, up to an interval.
        "execution.checkpointing.checkpoints-after-tasks-finish": "false",
    }
    if task["mini_batch"]:
        conf |= {
            "table.exec.mini-batch.enabled": "true",
            "table.exec.mini-batch.allow-latency": "2 s",
            "table.exec.mini-batch.size": "50000",
            "table.optimizer.distinct-agg.split.enabled": "true",
        }
    return conf


def open_tables(task: dict[str, Any], checkpoints: Path) -> TableEnvironment:
    tables = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    for key, value in settings(task, checkpoints).items():
        tables.get_config().set(key, value)
    for name, columns in TABLES.items():
        path = (Path(task["folder"]) / name).as_uri()
        tables.execute_sql(
            f"CREATE TABLE {name} ({columns}, "
            "date_time AS CAST(TO_TIMESTAMP_LTZ(ms, 3) AS TIMESTAMP(3)), "
            "WATERMARK FOR date_time AS date_time - INTERVAL '4' SECOND) "
            f"WITH ('connector' = 'filesystem', 'format' = 'csv', 'path' = '{path}')"
        )
    return tables


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Run a query to its end, with a sink that drops its rows."""
    checkpoints = Path(task["work"]) / f"flink-{time.time_ns()}"
    query = open_tables(task, checkpoints).sql_query(QUERIES[task["query"]])
    sink = TableDescriptor.for_connector("blackhole").build()
    started = time.perf_counter()
    job = query.execute_insert(sink).get_job_client()
    future = job.get_job_execution_result()
    made = 0
    while not future.done():
        time.sleep(0.02)
        # Only the newest is kept on disk, and its number says how many there were.
        made = max([made, *(int(p.name[4:]) for p in checkpoints.glob("*/chk-*"))])
    future.result()
    return {"seconds": time.perf_counter() - started, "checkpoints": made}


def collect(task: dict[str, Any]) -> dict[str, Any]:
    """Run a query and return its changes: each a row as texts, and whether it is put or removed."""
    query = open_tables(task, Path(task["work"]) / "flink-check").sql_query(QUERIES[task["query"]])
    with query.execute().collect() as found:
        changes = [
            (
                [None if value is None else str(value) for value in change],
                change.get_row_kind().name in ("INSERT", "UPDATE_AFTER"),
            )
            for change in found
        ]
    return {"changes": changes}


def main() -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = collect(task) if task.get("collect") else run(task)
        except Exception as error:
            # The first line that says what Flink objects to; the rest is Java's stack.
            answer = {"refused": str(error)[:2000]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
