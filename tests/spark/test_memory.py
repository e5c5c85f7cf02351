"""A slot that the kernel kills for its memory: the failure names the slot and its states."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from cairn import Job, KeyedProcess, sinks, state
from cairn.storage.store import open_store
from tests.spark.support import finish, published


class KilledOnce(KeyedProcess):
    """Dies as by the kernel's OOM killer, in the second epoch and once."""

    n = state.Value(int, default=0)

    def __init__(self, mark):
        self.mark = str(mark)

    def process(self, row, ctx):
        if row.k == 2 and not Path(self.mark).exists():
            Path(self.mark).touch()
            time.sleep(1.5)  # A slot looks at its memory twice a second.
            os.kill(os.getpid(), signal.SIGKILL)
        self.n.set(self.n.get() + 1)
        return row.k, self.n.get()


@pytest.mark.soak
def test_a_slot_killed_at_its_limit_of_memory_is_named_with_its_states_and_loses_nothing(
    spark, make_input, tmp_path
):
    rows = make_input("k long").add((1,)).add((2,))
    job = Job("memory", max_parallelism=4)
    counted = job.source("rows", rows.stream(spark)).key_by("k")
    counted = counted.process(KilledOnce(tmp_path / "mark"), schema="k long, n long", uid="count")
    counted.sink_to(sinks.Files(str(tmp_path / "out")), uid="out")
    finish(job, tmp_path / "c", parallelism=1, slot_memory_mb=64)
    store = open_store(str(tmp_path / "c"))
    (failure,) = [store.get(found.path).decode() for found in store.list("failures")]
    assert "the slot of subtask 0 is gone" in failure
    assert "of 64 MiB; largest states: count (1 entries)" in failure
    assert "next: more subtasks" in failure
    assert sorted((row["k"], row["n"]) for row in published(tmp_path / "out")) == [(1, 1), (2, 1)]
