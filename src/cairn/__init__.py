"""cairn: managed state for PySpark. Spark moves the data, cairn keeps the state."""

from cairn import logs, sinks, state, windows
from cairn.client import client
from cairn.driver.serving import Serve
from cairn.driver.spark_config import spark_config
from cairn.errors import (
    CairnError,
    CommitConflictError,
    CommitError,
    CommitUnknownError,
    CorruptFileError,
    EpochError,
    FunctionError,
    KeyGroupCountError,
    NoEpochError,
    PlanError,
    QueryError,
    RestoreError,
    StaleEpochError,
    StateNotFoundError,
    StateSchemaError,
)
from cairn.functions import BatchContext, BatchProcess, Context, KeyedProcess, Process
from cairn.job import Job
from cairn.keyed import KeyedStream
from cairn.operators.window_functions import WindowFunction
from cairn.query.live import Answer
from cairn.query.reader import diff_state, read_state
from cairn.run import Run
from cairn.savepoint_writer import SavepointWriter
from cairn.session import session
from cairn.stream import Stream
from cairn.types import SchemaLike
from cairn.types.durations import Duration
from cairn.version import VERSION

__version__ = VERSION

__all__ = [
    "Answer",
    "BatchContext",
    "BatchProcess",
    "CairnError",
    "CommitConflictError",
    "CommitError",
    "CommitUnknownError",
    "Context",
    "CorruptFileError",
    "Duration",
    "EpochError",
    "FunctionError",
    "Job",
    "KeyGroupCountError",
    "KeyedProcess",
    "KeyedStream",
    "NoEpochError",
    "PlanError",
    "Process",
    "QueryError",
    "RestoreError",
    "Run",
    "SavepointWriter",
    "SchemaLike",
    "Serve",
    "StaleEpochError",
    "StateNotFoundError",
    "StateSchemaError",
    "Stream",
    "WindowFunction",
    "client",
    "diff_state",
    "logs",
    "read_state",
    "session",
    "sinks",
    "spark_config",
    "state",
    "windows",
]
