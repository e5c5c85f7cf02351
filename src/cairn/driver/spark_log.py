"""Leave out of Spark's log what the run's own error says when an epoch fails.

For one line of a user's that raises, Spark's log has the traces of every task, of the batch and
of the query, hundreds of lines. Only records of cairn's own tasks and queries are left out,
also in a session of the user's; the driver logs what Spark raised at level debug.

Always true here:
- records of other queries are shown as ever, but for the line that says that a job was aborted;
- a session whose log cannot be changed runs the job all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cairn.logs import logger
from cairn.protocol.messages import FAILURE_MARK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_PROPERTY: Final = "mdc.cairn"
"""A local property of this name is in the diagnostic context of the tasks of a thread's jobs."""
QUERY_PREFIX: Final = "cairn-"
"""Prefix of the names of cairn's queries."""

_EXECUTOR: Final = "org.apache.spark.executor.Executor"
_MESSAGES: Final = {
    "org.apache.spark.scheduler.TaskSetManager": (
        rf"(?s).*(?:{FAILURE_MARK}|failed \d+ times; aborting job).*"
    ),
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution": (
        rf"(?s).*Query {QUERY_PREFIX}.*terminated with error.*"
    ),
}


def leave_out_failures(spark: SparkSession) -> None:
    """Keep what tasks and queries of cairn's fail with out of this driver's log of Spark's."""
    try:
        _add_filters(spark)
    except Exception:
        logger.debug("Spark's log cannot be changed", exc_info=True)


def _add_filters(spark: SparkSession) -> None:
    log4j = spark._jvm.org.apache.logging.log4j
    core = log4j.core
    deny, neutral = core.Filter.Result.DENY, core.Filter.Result.NEUTRAL
    gateway = spark.sparkContext._gateway
    pairs = gateway.new_array(core.util.KeyValuePair, 1)
    pairs[0] = core.util.KeyValuePair(TASK_PROPERTY, "true")
    by_task = core.filter.ThreadContextMapFilter.createFilter(pairs, "and", deny, neutral)
    filters: dict[str, Any] = {_EXECUTOR: by_task}
    for name, pattern in _MESSAGES.items():
        filters[name] = core.filter.RegexFilter.createFilter(pattern, None, False, deny, neutral)
    context = log4j.LogManager.getContext(False)
    config = context.getConfiguration()
    for name, each in filters.items():
        known = config.getLoggers().get(name)
        if known is None:
            known = core.config.LoggerConfig(name, None, True)
            config.addLogger(name, known)
        if known.getFilter() is None:
            known.addFilter(each)
    context.updateLoggers()
