"""Spark's Python daemon, with the modules of forwarders loaded before it forks workers.

    python -m cairn.worker.daemon pyspark.worker          Spark's setting spark.python.daemon.module

Otherwise each worker would load pyarrow, pandas and cairn at its first task, for nearly a second.
Nothing else differs from Spark's own daemon.
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
    # Workers need not collect the modules loaded so far.
    gc.collect()
    gc.freeze()
    manager()
