"""Workers on a machine without the mount say so, and make no folder that nobody else would find."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from cairn.driver.options import check_memory
from cairn.errors import CommitError, PlanError, QueryError, RestoreError
from cairn.query.reader import _open_here
from cairn.sinks.wal import _Reader
from cairn.snapshots.destination import Destination, open_claimed
from cairn.storage.store import open_store


def test_reader_of_rows_to_be_published_does_not_take_a_missing_folder_for_an_empty_one(
    tmp_path: Path,
) -> None:
    read = _Reader(str(tmp_path / "checkpoint"), "wal/j/s/staged/")
    names = pa.RecordBatch.from_pydict({"name": ["1-0-x.parquet"]})
    with pytest.raises(CommitError, match="does not see the rows to be published"):
        list(read(iter([names])))
    assert not (tmp_path / "checkpoint").exists()


def test_executor_writes_no_part_of_a_savepoint_to_a_folder_that_is_not_the_drivers(
    tmp_path: Path,
) -> None:
    url = str(tmp_path / "savepoint")
    with pytest.raises(RestoreError, match="cannot see the folder"):
        open_claimed(url)
    assert not (tmp_path / "savepoint").exists()
    with pytest.raises(RestoreError, match="cannot see the folder"):
        open_claimed(str(tmp_path))
    Destination(open_store(url), "an id", 1)
    assert open_claimed(url).url == f"file://{url}"


def test_reader_of_state_says_that_the_checkpoint_is_not_on_its_machine(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="does not see the checkpoint"):
        _open_here(str(tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("master", ["spark://master:7077", "yarn", "k8s://https://host:443"])
def test_checkpoint_in_memory_is_refused_beyond_one_machine(master: str) -> None:
    with pytest.raises(PlanError, match="memory of the driver's machine"):
        check_memory("memory:name", master)
    check_memory("s3://bucket/name", master)


@pytest.mark.parametrize("master", ["local", "local[4]", "local-cluster[2,1,1024]"])
def test_checkpoint_in_memory_is_fine_on_one_machine(master: str) -> None:
    check_memory("memory:", master)
