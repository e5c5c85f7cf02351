"""Where epochs, state files and the log live. See the modules for what each promises."""

from cairn.storage.files import (
    SegmentReader,
    SegmentWriter,
    StateFile,
    encode_segment,
    open_segment,
)
from cairn.storage.holds import Holds, read_holds
from cairn.storage.log import Log, create_or_open_job, new_nonce, read_job
from cairn.storage.manifest import (
    EMPTY_VERSION,
    Ancestor,
    Epoch,
    EpochOperator,
    FileRef,
    JobInfo,
    RangeState,
    Record,
    Restore,
    SparkPosition,
    StateDecl,
    Takeover,
    next_version,
)
from cairn.storage.pack import state_path, write_pack, write_segment, write_segment_file
from cairn.storage.removal import Removed, delete_checkpoint, delete_savepoint
from cairn.storage.retention import Collected, Collector, collect, retained
from cairn.storage.store import NotFoundError, Store, StoredObject, open_store
from cairn.storage.verify import Report, verify

__all__ = [
    "EMPTY_VERSION",
    "Ancestor",
    "Collected",
    "Collector",
    "Epoch",
    "EpochOperator",
    "FileRef",
    "Holds",
    "JobInfo",
    "Log",
    "NotFoundError",
    "RangeState",
    "Record",
    "Removed",
    "Report",
    "Restore",
    "SegmentReader",
    "SegmentWriter",
    "SparkPosition",
    "StateDecl",
    "StateFile",
    "Store",
    "StoredObject",
    "Takeover",
    "collect",
    "create_or_open_job",
    "delete_checkpoint",
    "delete_savepoint",
    "encode_segment",
    "new_nonce",
    "next_version",
    "open_segment",
    "open_store",
    "read_holds",
    "read_job",
    "retained",
    "state_path",
    "verify",
    "write_pack",
    "write_segment",
    "write_segment_file",
]
