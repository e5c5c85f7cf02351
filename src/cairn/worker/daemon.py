"""Spark's Python daemon with what forwarders need already loaded: its workers are forks of it.

    python -m cairn.worker.daemon pyspark.worker          Spark's setting spark.python.daemon.module

A worker would load pyarrow, pandas and cairn at its first task, nearly a second of work in each
of them. Nothing else is different from Spark's own daemon.
"""

from __future__ import annotations

import gc

import pandas  # noqa: F401
import pyarrow.flight  # noqa: F401
import pyspark.sql.pandas.serializers
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import cairn.worker.forward  # noqa: F401

if __name__ == "__main__":
    # Modules loaded by now stay: the collector of a worker need not look through them.
    gc.collect()
    gc.freeze()
    manager()
