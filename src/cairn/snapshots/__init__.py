"""Work with committed epochs without Spark, whether the job runs or not."""

from cairn.snapshots.diff import Example, StateDiff, diff_epochs
from cairn.snapshots.load import load_savepoint
from cairn.snapshots.reader import EpochReader
from cairn.snapshots.savepoint import Savepoint, SavepointInfo, open_savepoint
from cairn.snapshots.saving import write_savepoint

__all__ = [
    "EpochReader",
    "Example",
    "Savepoint",
    "SavepointInfo",
    "StateDiff",
    "diff_epochs",
    "load_savepoint",
    "open_savepoint",
    "write_savepoint",
]
