"""Stores out of reach: told from stores that refuse, in the driver at a start and in slots."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.errors import CommitError, EpochError
from cairn.protocol.spec import JobSpec, SinkSpec
from cairn.sinks import Delta, Files
from cairn.sinks.base import Execution, Sink, SinkContext, refuse_if_away
from cairn.slot.sink import SinkRuntime
from tests.places import SCHEMA, batch

URL = "s3://bucket/out"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bucket at an address where nobody listens."""
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("cairn.storage.store.backoff_s", lambda failures: 0.001)
    yield


def in_slot(sink: Sink, scratch: Path) -> SinkRuntime:
    spec = SinkSpec("out", SCHEMA, pickle.loads(pickle.dumps(sink)), lane=0)
    job = JobSpec("job", "j", group_count=1, checkpoint=str(scratch), backend="heap", levels=())
    return SinkRuntime(spec, job, str(scratch))


def test_a_start_without_the_store_of_a_delta_table_says_that_it_is_away() -> None:
    sink = Delta(URL)
    with (
        pytest.raises(CommitError, match="sink 'out' cannot be reached") as away,
        refuse_if_away("out", sink),
    ):
        sink.open(SinkContext("job", "j", "out", SCHEMA))
    assert away.value.is_away


def test_a_start_without_the_store_of_files_says_that_it_is_away() -> None:
    sink = Files(URL)
    with (
        pytest.raises(CommitError, match="sink 'out' cannot be reached"),
        refuse_if_away("out", sink),
    ):
        sink.open(SinkContext("job", "j", "out", SCHEMA))
        sink.recover(2)


def test_a_slot_that_cannot_write_files_is_told_to_wait_for_the_store(tmp_path: Path) -> None:
    slot = in_slot(Files(URL), tmp_path)
    slot.writer = slot.sink.writer(2, 0, Execution())
    with pytest.raises(EpochError, match="sink 'out' could not be written") as away:
        slot.write(batch((1, "a")))
        slot.prepare()
    assert away.value.is_away and away.value.sink == "out"


def test_a_slot_that_cannot_open_a_delta_table_is_told_to_wait_for_the_store(
    tmp_path: Path,
) -> None:
    with pytest.raises(EpochError, match="sink 'out' could not be written") as away:
        in_slot(Delta(URL), tmp_path)
    assert away.value.is_away and away.value.sink == "out"


@pytest.mark.parametrize("sink", [Files("/out"), Delta("/out")])
def test_a_disk_that_refuses_is_not_waited_for(sink: Sink) -> None:
    for error in (PermissionError(13, "denied"), OSError(28, "no space left"), ValueError("x")):
        assert not sink.is_away(error)
    assert sink.is_away(ConnectionResetError())
