"""A sink in a slot: what a failing attempt leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cairn.errors import EpochError
from cairn.protocol.spec import SinkSpec
from cairn.sinks.base import Execution
from cairn.slot.sink import SinkRuntime
from tests.places.base import batch
from tests.unit.sinks.files.folders import SCHEMA, Folder


@pytest.mark.parametrize("partition_by", [(), ("k",)])
def test_a_writer_that_cannot_prepare_is_aborted(tmp_path: Path, partition_by: str) -> None:
    folder = Folder(tmp_path, partition_by=partition_by)
    runtime = SinkRuntime.__new__(SinkRuntime)
    runtime.sink = sink = folder.sink(in_slot=True)
    runtime.spec = SinkSpec("out", SCHEMA, sink, None)

    def full(path: str, local_file: str) -> None:
        raise OSError(28, "No space left on device")

    sink._store.put_file = full  # type: ignore[method-assign]
    runtime.writer = sink.writer(2, 0, Execution())
    runtime.writer.write(batch((1, "a"), (2, "b")))
    with pytest.raises(EpochError, match="No space left"):
        runtime.prepare()
    assert os.listdir(folder.scratch) == [] and runtime.writer is None
