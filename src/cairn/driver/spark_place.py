"""The place of Spark's streaming checkpoint: in the job's checkpoint, or on the driver's disk.

Spark writes to a folder by itself. To a bucket it would need a Hadoop connector, and its files are
renamed, which buckets do slowly; in HDFS each of its files would delay an epoch. So for a
checkpoint in a bucket or in HDFS Spark's folder is on the driver's disk, and every start lays it
out from the newest epoch:

    <runtime>/<run>/<driver>/p-spark/spark/<term>/

Always true here:
- nothing in a folder on the driver's disk is needed after the run: an epoch has the offsets and
  what sources keep. An at-most-once job also needs the batches that were planned and are in no
  epoch, so `keep` copies its folder to the checkpoint before a batch is read;
- two runs have two folders, also two runs of one job on one host;
- the folder is removed with its run; after a kill, by the next run that needs one here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import weakref
from pathlib import Path

from cairn.process_identity import identify
from cairn.runtime_folder import hold_made, runtime_root
from cairn.slot.folders import executor_name, run_folder, sweep
from cairn.storage.store import NotFoundError, Store, open_store


class SparkPlace:
    """`store` has the folder that Spark writes to; `kept` has the folders of earlier runs."""

    def __init__(self, store: Store, kept: Store | None = None) -> None:
        self.store = store
        self.kept = store if kept is None else kept
        self._copied: set[str] = set()

    @property
    def is_on_driver(self) -> bool:
        """True if every run has a folder of its own on the driver's disk."""
        return self.store is not self.kept

    def keep(self, folder: str) -> None:
        """Copy what is new in Spark's folder to the checkpoint; nothing if it is there already.

        A batch counts as planned when its offsets are there, so they are copied last.
        """
        if not self.is_on_driver:
            return
        found = {there.path for there in self.store.list(folder)}
        for path in sorted(found - self._copied, key=lambda path: "/offsets/" in path):
            # Spark removes old files meanwhile.
            with contextlib.suppress(NotFoundError):
                self.kept.put(path, self.store.get(path))
        self.kept.delete(sorted(self._copied - found))
        self._copied = found

    def close(self) -> None:
        """Remove the folder on the driver's disk, if there is one."""


class DriverDisk(SparkPlace):
    """A folder of one run, on the driver's disk."""

    def __init__(self, checkpoint: Store, run_id: str) -> None:
        root = runtime_root()
        home = run_folder(run_id) / executor_name(identify())
        held = contextlib.ExitStack()
        held.enter_context(hold_made(home))
        folder = home / "p-spark"
        folder.mkdir(mode=0o700)
        super().__init__(open_store(str(folder)), kept=checkpoint)
        self._remove = weakref.finalize(self, _remove, home, held, os.getpid())
        # On a host of drivers alone nobody else removes what killed ones have left.
        threading.Thread(target=_sweep, args=(root,), daemon=True, name="cairn-sweep").start()

    def close(self) -> None:
        self._remove()


def _remove(home: Path, held: contextlib.ExitStack, owner: int) -> None:
    # A forked child exits too, while its parent still works.
    if os.getpid() != owner:
        return
    held.close()
    shutil.rmtree(home, ignore_errors=True)
    with contextlib.suppress(OSError):
        home.parent.rmdir()  # Slots may have logs there.


def _sweep(root: Path) -> None:
    with contextlib.suppress(OSError):
        sweep(root, time.time())


def choose_place(checkpoint: Store, spark_checkpoint: Store | None, run_id: str) -> SparkPlace:
    """Return the place of Spark's folder: the given one, the checkpoint, or the driver's disk."""
    if spark_checkpoint is not None:
        return SparkPlace(spark_checkpoint)
    if checkpoint.local_path("spark") is not None:
        return SparkPlace(checkpoint)
    return DriverDisk(checkpoint, run_id)
