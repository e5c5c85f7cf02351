"""The forwarder gives a slot the rows of its level, and lets everything else pass."""

from __future__ import annotations

import threading
import time
from typing import Any

import pyarrow as pa
import pytest

from cairn.protocol.envelope import Envelope
from cairn.protocol.messages import find_failure
from cairn.types import parse_schema
from cairn.worker.forward import Forward, SubtaskError, _check_groups, _Output

MINE = (1, parse_schema("k long, s string"))
LATER = (2, parse_schema("s string"))
NEXT = (3, parse_schema("s string, x double"))


def forward_of(incoming: Envelope, outgoing: Envelope) -> Forward:
    return Forward("run", 1, (1,), incoming, outgoing, 16, "", b"", None)


def test_rows_of_one_lane_go_to_the_slot_and_acknowledgements_past_it() -> None:
    forward = forward_of(Envelope((MINE,)), Envelope((NEXT,)))
    batch = pa.record_batch(
        {
            "group": pa.array([3, 1, 3], pa.int32()),
            "c0": pa.array([7, None, 8]),
            "c1": pa.array(["a", None, None]),
            "ack": pa.array([None, b"A", None], pa.binary()),
        }
    )
    mine, (passing,) = forward._split(batch)
    assert mine["c0"].to_pylist() == [7, 8]
    assert passing.to_pylist() == [{"c0": None, "c1": None, "ack": b"A"}]
    assert forward._split(batch.slice(0, 1))[1] == []


def test_rows_on_their_way_to_a_later_level_change_columns_and_pass() -> None:
    forward = forward_of(Envelope((MINE, LATER)), Envelope((LATER, NEXT)))
    batch = pa.record_batch(
        {
            "lane": pa.array([1, 2, None], pa.int32()),
            "group": pa.array([3, 0, 0], pa.int32()),
            "c0": pa.array([7, None, None], pa.int64()),
            "c1": pa.array(["a", "b", None]),
            "ack": pa.array([None, None, b"A"], pa.binary()),
        }
    )
    mine, passing = forward._split(batch)
    assert mine["c1"].to_pylist() == ["a"]
    assert [row for each in passing for row in each.to_pylist()] == [
        {"lane": None, "c0": None, "c1": None, "ack": b"A"},
        {"lane": 2, "c0": "b", "c1": None, "ack": None},
    ]


def test_row_of_the_pin_table_is_neither_sent_nor_passed_on() -> None:
    forward = forward_of(Envelope((MINE,)), Envelope(()))
    pin = pa.record_batch(
        {
            "group": pa.array([None], pa.int32()),
            "c0": pa.array([None], pa.int64()),
            "c1": pa.array([None], pa.string()),
        }
    )
    mine, passing = forward._split(pin)
    assert not mine.num_rows and not passing


def test_row_of_another_subtask_fails_the_task() -> None:
    _check_groups(pa.array([4, 7], pa.int32()), range(4, 8))
    for strange in ([4, 8], [3]):
        with pytest.raises(SubtaskError) as caught:
            _check_groups(pa.array(strange, pa.int32()), range(4, 8))
        failure = find_failure(str(caught.value))
        assert failure is not None and "a subtask that owns 4 to 7" in failure.message


def test_a_forward_of_another_version_refuses_to_run_in_one_sentence() -> None:
    forward = forward_of(Envelope((MINE,)), Envelope((NEXT,)))
    forward.version = "0.0.9"
    with pytest.raises(SubtaskError) as refused:
        next(forward(iter(())))
    failure = find_failure(str(refused.value))
    assert failure is not None and failure.kind == "PlanError"
    assert "the driver runs cairn 0.0.9, the executor on" in failure.message.splitlines()[0]


def test_the_error_of_a_slot_that_ended_the_stream_is_not_hidden_by_the_writer() -> None:
    refused = threading.Event()

    class Writer:
        def begin(self, schema: pa.Schema) -> None:
            refused.set()
            raise OSError("Could not write record batch to stream (server disconnect?)")

    def read(out: _Output) -> None:
        refused.wait(10)
        time.sleep(0.2)  # The writer's error is there first.
        raise SubtaskError("no alarm, please")

    forward = forward_of(Envelope((MINE,)), Envelope((NEXT,)))
    writer: Any = Writer()
    output = _Output([read, lambda out: forward._write(writer, None, iter([]), out)])
    with pytest.raises(SubtaskError, match="no alarm, please"):
        list(output.items())
