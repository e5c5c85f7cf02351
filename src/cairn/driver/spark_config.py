"""Settings that cairn needs of Spark.

Some settings are needed for correct results and are refused when wrong; others only cost time and
are warned about. Settings that must be made before Spark starts are in `spark_config()`; the
others are made per query, on the session Spark makes for it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cairn.driver.coordinator.batch_limit import BATCH_BYTES_MAX
from cairn.errors import PlanError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILE_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

LOCALITY_WAIT = "spark.locality.wait.process"
LOCALITY_WAIT_MS_MIN = 10_000
"""With less, Spark gives a subtask away while others run on the executor of its slot."""
_UNITS_MS = {"us": 0.001, "ms": 1, "": 1, "s": 1000, "m": 60_000, "min": 60_000}
_UNITS_MS |= {"h": 3_600_000, "d": 86_400_000}

BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
# Settings of the epoch's own session: the user's other queries keep theirs.
EPOCH_CONFIG = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16384",
    BATCH_BYTES: str(BATCH_BYTES_MAX),
    # The rows of a single subtask are one partition, whatever size Spark expects them to have.
    "spark.sql.maxSinglePartitionBytes": str(2**63 - 1),
    # The plan of a batch says that it is a stream's; it is planned once more, with the job.
    "spark.sql.streaming.unsupportedOperationCheck": "false",
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
    # Subtasks run even if the optimizer finds that no rows will come.
    "spark.sql.optimizer.excludedRules": (
        "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation"
    ),
}


def spark_config() -> dict[str, str]:
    """Return the settings for your own session, before it starts."""
    return {
        # Spark would otherwise move a small subtask to where its input lies, away from its slot.
        "spark.shuffle.reduceLocality.enabled": "false",
        "spark.speculation": "false",
        # A subtask waits for the executor of its slot: elsewhere it would restore all its state.
        LOCALITY_WAIT: "60s",
        # With dynamic allocation: no later epoch reads the pin tables and shuffle files of an
        # executor without subtasks. By default Spark would keep it for ever.
        "spark.dynamicAllocation.cachedExecutorIdleTimeout": "120s",
        "spark.dynamicAllocation.shuffleTracking.timeout": "120s",
        # Spark's default one starts processes to set permissions, twice an epoch.
        "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
        # Without it the JVM complains loudly when a query is stopped inside an epoch.
        "spark.driver.extraJavaOptions": "-Xss8m",
        "spark.sql.session.timeZone": "UTC",
    }


def is_cluster(spark: SparkSession) -> bool:
    """True if there may be several executors. With one, there is one place for all slots."""
    return _has_executors(spark.sparkContext.master)


def _has_executors(master: str) -> bool:
    return not master.startswith("local[") and master != "local"


def set_epoch_config(session: SparkSession) -> None:
    """Make the settings of an epoch in the session that plans it."""
    for setting, value in EPOCH_CONFIG.items():
        if setting == "spark.sql.optimizer.excludedRules":
            rules = {value, *session.conf.get(setting, "").split(",")}
            value = ",".join(sorted(filter(None, rules)))
        session.conf.set(setting, value)


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
    if _has_executors(conf.get("spark.master", "local")):
        slow[LOCALITY_WAIT] = "subtasks will move to other executors, where their state is restored"
    for setting, cost in slow.items():
        expected = spark_config()[setting]
        is_other = conf.get(setting) != expected
        if setting == LOCALITY_WAIT:
            is_other = _locality_wait_ms(conf) < LOCALITY_WAIT_MS_MIN
        if is_other:
            warnings.warn(
                f"{setting} is not {expected}: {cost}; start the session with "
                "cairn.session(name), or put cairn.spark_config() into yours",
                stacklevel=3,
            )


def _locality_wait_ms(conf: Mapping[str, str]) -> float:
    """Return how long a task waits for the executor of its slot."""
    text = conf.get(LOCALITY_WAIT, conf.get("spark.locality.wait", "3s"))
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS_MS:
        return 0.0  # Spark refuses it by itself.
    return int(found[1]) * _UNITS_MS[found[2]]
