"""Where Spark's streaming checkpoint is, and what is left of it after the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.driver.spark_place import DriverDisk, SparkPlace, choose_place
from cairn.storage.store import Store, open_store

OFFSETS = "spark/000000000001/offsets"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAIRN_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


class Bucket:
    """A store that is not a folder of this machine."""

    def __init__(self) -> None:
        self.inner = open_store("memory:")

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def local_path(self, path: str) -> None:
        return None


def bucket() -> Store:
    return Bucket()  # type: ignore[return-value]


def test_spark_writes_to_a_folder_by_itself_and_not_to_a_bucket(root: Path) -> None:
    folder, given, checkpoint = open_store("memory:"), open_store("memory:"), bucket()
    assert choose_place(folder, None, "a" * 32).store is folder
    assert choose_place(checkpoint, given, "a" * 32).store is given
    place = choose_place(checkpoint, None, "a" * 32)
    assert place.is_on_driver and place.kept is checkpoint
    assert place.store.url.startswith(f"file://{root}/")
    place.close()


def test_two_runs_have_two_folders_and_each_is_removed_with_its_run(root: Path) -> None:
    checkpoint = bucket()
    places = [DriverDisk(checkpoint, run_id * 32) for run_id in "ab"]
    for place in places:
        place.store.put("spark/x", b"")
    places[0].close()
    assert places[1].store.exists("spark/x")
    places[1].close()
    assert list(root.iterdir()) == []


def test_the_folder_of_a_killed_driver_is_removed_by_the_next_one(root: Path) -> None:
    program = (
        "import os, signal\n"
        "from cairn.driver.spark_place import DriverDisk\n"
        "from cairn.storage.store import open_store\n"
        "place = DriverDisk(open_store('memory:'), 'a' * 32)\n"
        "place.store.put('spark/x', b'')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program], env=dict(os.environ))
    assert list(root.glob("*/*/p-spark/spark/x"))
    place = DriverDisk(bucket(), "b" * 32)
    deadline = 200
    while list(root.glob("a*/*/p-spark")) and deadline:
        deadline -= 1
        subprocess.run(["sleep", "0.05"])
    assert not list(root.glob("a*/*/p-spark"))
    assert list(root.glob("b*/*/p-spark")), "that of a living driver stays"
    place.close()


def test_planned_batches_are_copied_to_the_checkpoint_and_removed_as_spark_removes_them() -> None:
    disk, checkpoint = open_store("memory:"), bucket()
    place = SparkPlace(disk, kept=checkpoint)
    folder = "spark/000000000001"
    disk.put(f"{OFFSETS}/0", b"0")
    place.keep(folder)
    disk.put(f"{OFFSETS}/1", b"1")
    disk.delete([f"{OFFSETS}/0"])
    place.keep(folder)
    assert [found.path for found in checkpoint.list()] == [f"{OFFSETS}/1"]


def test_offsets_are_copied_after_the_files_that_they_name() -> None:
    disk, order = open_store("memory:"), []

    class Noted(Bucket):
        def put(self, path: str, data: bytes) -> None:
            order.append(path.split("/")[2])

    place = SparkPlace(disk, kept=Noted())  # type: ignore[arg-type]
    for name in ("offsets/0", "sources/0/0", "metadata"):
        disk.put(f"spark/000000000001/{name}", b"")
    place.keep("spark/000000000001")
    assert order[-1] == "offsets" and len(order) == 3
