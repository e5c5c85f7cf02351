"""Frames of an epoch that later frames begin with: plans that Spark optimizes by themselves."""

from __future__ import annotations

from pyspark.sql import DataFrame

from cairn.plan.columns import Columns


class Cuts:
    """The places where the plan of an epoch is cut in two."""

    def __init__(self, columns: Columns, parallelism: int) -> None:
        self._columns = columns
        self._parallelism = parallelism
        self.frames: list[DataFrame] = []
        """The frames before the cuts of the epoch that was planned last."""

    def cut(self, rows: DataFrame) -> DataFrame:
        """Return the same rows, as a plan that begins here.

        Otherwise the optimizer would push what each branch needs of rows and columns down, and
        make a shuffle for each of them.
        """
        self.frames.append(rows)
        session, jdf = rows.sparkSession, rows._jdf
        cut = session._jsparkSession.internalCreateDataFrame(
            jdf.queryExecution().toRdd(), jdf.schema(), False
        )
        return DataFrame(cut, session)

    def share(self, rows: DataFrame) -> DataFrame:
        """Return the same rows, for several branches: behind a shuffle that they have in common.

        Not a cache: a block of it is computed again when it is lost, or when two executors ask
        for it at once, and an operator whose result depends on chance or on the order of its
        rows would have run twice, with one result for each branch. Lost files of a shuffle are
        computed again too, but then Spark compares, and runs every reader of them again.
        """
        (here,) = self._columns.parse(f"pmod(spark_partition_id(), {self._parallelism})")
        return self.cut(rows.repartitionById(self._parallelism, here))
