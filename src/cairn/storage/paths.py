"""Names of the files and folders in a checkpoint, and of those that mark a savepoint."""

from __future__ import annotations

from typing import Final

JOB_PATH: Final = "job.json"
REMOVAL_PATH: Final = "removing.json"
"""Exists while the checkpoint is being removed: nobody may start from the rest of it."""

LEADER_PATH: Final = "leader.json"
STANDBYS_FOLDER: Final = "standbys"
"""The drivers that lead and wait, with the leadership `store:`. No job depends on them."""

LOG_FOLDER: Final = "epochs"
STATE_FOLDER: Final = "state"
HOLDS_FOLDER: Final = "holds"
PENDING_FOLDER: Final = "pending"
DATABASES_FOLDER: Final = "databases"
"""Notes of the servers that have state of the job beside the checkpoint, without secrets."""

PUBLISHED_FOLDER: Final = "published"
SPARK_FOLDER: Final = "spark"
WAL_FOLDER: Final = "wal"
"""Rows that wait for their sink to publish them. The sinks remove them, also those that a
takeover abandoned. Branches and savepoints do not need them."""

GRAPHS_FOLDER: Final = "graph"
FAILURES_FOLDER: Final = "failures"
SAVEPOINTS_FOLDER: Final = "savepoints"
ENDINGS_FOLDER: Final = "endings"
RESTARTS_FOLDER: Final = "restarts"
GROUP_FOLDER: Final = "group"
NOTE_FOLDERS: Final = (
    GRAPHS_FOLDER,
    FAILURES_FOLDER,
    SAVEPOINTS_FOLDER,
    ENDINGS_FOLDER,
    RESTARTS_FOLDER,
    GROUP_FOLDER,
)

PROBE_PREFIX: Final = "probe-"
"""Objects that a start writes and removes again; one that was killed may leave its own."""

SAVEPOINT_PATH: Final = "savepoint.json"
UNFINISHED_PATH: Final = "unfinished.json"
"""Exists from the first file of a savepoint until savepoint.json does: the claim of its writer."""
EXTERNAL_SUFFIX: Final = ".postgres"
"""Ends the path of a base whose rows are in a database."""
