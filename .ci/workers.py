"""Spark's Python daemon that has loaded what its workers need before it forks them.

    python -m workers pyspark.worker          Spark's setting spark.python.daemon.module

Tests start hundreds of workers, and every one would load pyarrow, pandas and cairn anew: nearly
a second each. Nothing else is different: what is loaded here, a worker loads at its first task.
"""

from __future__ import annotations

import pandas  # noqa: F401
import pyarrow.flight  # noqa: F401
import pyspark.sql.pandas.serializers
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import cairn.worker.forward  # noqa: F401

if __name__ == "__main__":
    manager()
