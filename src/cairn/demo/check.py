"""Check output and state against a plain Spark batch job over all payments.

The batch job does not use cairn: it has window functions and groupBy over the input. The state
is read from the checkpoint's newest epoch with the code that a slot restores with.

Always true here:
- every row is compared, by key and by value, not only the totals;
- `Comparison.ok` means the same rows, each exactly once; expected keys do not repeat.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from cairn.demo.fraud import ALERT, LARGE_CENTS, LEDGER, PAYMENT, TINY_CENTS, build
from cairn.functions import find_states
from cairn.snapshots.reader import EpochReader
from cairn.storage.log import Log
from cairn.storage.store import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEDGER_NAME = "payments"

ALERTS_SQL = """
  select id, account, shop, cents,
         row_number() over (partition by account, shop order by ts) as payments_there,
         lag(cents) over (partition by account order by ts) as before
  from payments
"""
LEDGER_SQL = """
  select id, account,
         row_number() over (partition by account order by ts) as payments,
         sum(cents) over (partition by account order by ts) as spent
  from payments
"""
ACCOUNTS_SQL = """
  select account, count(*) as payments, sum(cents) as spent, max_by(cents, ts) < {tiny} as armed
  from payments group by account
"""
SHOPS_SQL = "select account, shop, count(*) as payments from payments group by account, shop"


class Comparison(NamedTuple):
    """Rows expected and rows found."""

    name: str
    expected: int
    found: int
    lost: int
    duplicated: int
    unknown: int
    wrong: int

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.unknown or self.wrong)


def check(spark: SparkSession, payments: Path, out: Path, checkpoint: Path) -> list[Comparison]:
    """Compare ledger and alerts in the output, accounts and shops in the state."""
    spark.read.schema(PAYMENT).parquet(str(payments)).createOrReplaceTempView("payments")
    alerts = spark.sql(ALERTS_SQL).where(f"before < {TINY_CENTS} and cents >= {LARGE_CENTS}")
    state = read_state(spark, checkpoint, payments, out)
    accounts = (
        state["payments"]
        .selectExpr("key as account", "value as payments")
        .join(state["spent"].selectExpr("key as account", "value as spent"), "account", "full")
        .join(state["armed"].selectExpr("key as account", "value as armed"), "account", "full")
        .selectExpr("account", "payments", "spent", "coalesce(armed, false) as armed")
    )
    shops = state["shops"].selectExpr("key as account", "entry as shop", "value as payments")
    expected_accounts = spark.sql(ACCOUNTS_SQL.format(tiny=TINY_CENTS))
    ledger_found = _read_output(spark, out / "ledger", LEDGER)
    alerts_found = _read_output(spark, out / "alerts", ALERT)
    return [
        compare(LEDGER_NAME, spark.sql(LEDGER_SQL), ledger_found, "id"),
        compare("alerts", alerts, alerts_found, "id"),
        compare("accounts in state", expected_accounts, accounts, "account"),
        compare("shops in state", spark.sql(SHOPS_SQL), shops, "account", "shop"),
    ]


def compare(name: str, expected: DataFrame, found: DataFrame, *keys: str) -> Comparison:
    """Count each distinct row on both sides, and classify those whose counts differ."""
    from pyspark.sql import functions as F

    # A row number is an int in SQL and a long in the job.
    kinds = {field.name: field.dataType for field in found.schema}
    expected = expected.select(*(F.col(name).cast(kind) for name, kind in kinds.items()))
    sides = expected.selectExpr("*", "1 as e", "0 as f").union(
        found.selectExpr("*", "0 as e", "1 as f")
    )
    rows = sides.groupBy(*kinds).agg(F.sum("e").alias("e"), F.sum("f").alias("f"))
    totals = rows.selectExpr("sum(e)", "sum(f)", "count_if(e != f)").first()
    assert totals is not None, "an aggregate has one row"
    expected_rows, found_rows, differing = (int(number or 0) for number in totals)
    if not differing:
        return Comparison(name, expected_rows, found_rows, 0, 0, 0, 0)
    by_key = rows.where("e != f").groupBy(*keys).agg(F.sum("e").alias("e"), F.sum("f").alias("f"))
    faults = by_key.selectExpr(
        "count_if(e > 0 and f = 0)",
        "sum(if(e > 0 and f > e, f - e, 0))",
        "sum(if(e = 0, f, 0))",
        # The key occurs as often as expected, so its values differ.
        "count_if(e > 0 and f = e)",
    ).first()
    assert faults is not None, "an aggregate has one row"
    return Comparison(name, expected_rows, found_rows, *(int(number or 0) for number in faults))


def read_state(
    spark: SparkSession, checkpoint: Path, payments: Path, out: Path
) -> dict[str, DataFrame]:
    """Return the fraud operator's state at the newest epoch, a DataFrame per state."""
    store = open_store(str(checkpoint))
    log = Log(store)
    newest = log.newest_epoch()
    assert newest is not None, "there is an epoch: its output has been read"
    graph = build(spark, str(payments), str(out)).graph()
    (operator,) = graph.levels[0].operators
    found = {}
    with EpochReader(store, newest) as reader:
        for name, declaration in find_states(operator.function).items():
            batches = list(reader.rows(operator.uid, name))
            empty = f"key long, entry string, value {declaration.ddl}"
            found[name] = (
                spark.createDataFrame(pa.Table.from_batches(batches))
                if batches
                else spark.createDataFrame([], empty)
            )
    return found


def _read_output(spark: SparkSession, folder: Path, schema: str) -> DataFrame:
    if not any(folder.glob("*.parquet")):
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(str(folder))
