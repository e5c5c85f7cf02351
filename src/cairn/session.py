"""A short way to get a Spark session that is ready for cairn."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

from cairn.driver.interrupts import print_no_traceback
from cairn.driver.spark_config import spark_config
from cairn.driver.spark_noise import log_level
from cairn.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUIET_LEVEL: Final = "ERROR"


def session(name: str, **conf: Any) -> SparkSession:
    """A local Spark session ready for cairn. Keywords are Spark settings, `.` written as `__`.

    `master` is short for `spark.master`; without it the machine's cores are used, or what
    `spark-submit` asks for. Spark starts without its banner and its warnings, unless
    `CAIRN_SPARK_LOG=1` is in the environment.
    """
    print_no_traceback()
    java = find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.app.name": name,
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": log_level() or QUIET_LEVEL,
        **spark_config(),
    }
    for key, value in conf.items():
        key = key.replace("__", ".")
        key = key if key.startswith("spark.") else f"spark.{key}"
        settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
    from cairn.driver.spark_start import start_session

    return start_session(settings, java, is_quiet=settings["spark.log.level"] == QUIET_LEVEL)
