"""A base that was given up half way leaves rows in a database; no later base counts them."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.backends.contract import ABSENT, BaseCancelledError, BaseTarget
from cairn.backends.overlay import Table, make_table
from cairn.ids import new_id
from cairn.storage.manifest import FileRef
from cairn.storage.store import open_store
from tests.backends import VERSIONED, make
from tests.unit.backends.bases import GROUP_COUNT, declarations, read_batches, stored
from tests.unit.backends.test_bases import EPOCH, Model

GROUPS = range(GROUP_COUNT)


class Job:
    """The epochs of a job, and the slot that has its state."""

    def __init__(self, backend: str, folder: str) -> None:
        self.kind, self.folder, self.job_id = backend, folder, new_id()
        self.store = open_store(f"{folder}/store")
        self.model = Model()
        self.epoch = 0
        self.base: FileRef | None = None
        self.deltas: list[dict[str, pa.RecordBatch]] = []
        """Those after the base."""
        self._names = itertools.count()
        self.start_slot()

    def start_slot(self) -> None:
        """Begin with a slot that restores the newest epoch."""
        directory = f"{self.folder}/slot{next(self._names)}"
        self.backend = make(self.kind, directory, 1 << 20, job_id=self.job_id, operator="op")
        self.tables: dict[str, Table] = {}
        for name, declaration in declarations().items():
            table = make_table(declaration, pa.int64(), self.backend, GROUP_COUNT)
            table.assign(GROUPS)
            self.tables[name] = table
        if self.base is not None:
            assert self.backend.load(self.store, self.base, GROUPS)
        for deltas in self.deltas:
            for name, delta in deltas.items():
                self.tables[name].apply(delta)

    def lose_slot(self) -> None:
        self.backend.close()
        self.start_slot()

    def run(self, changes: list[Any]) -> None:
        """Commit an epoch."""
        self.epoch += 1
        deltas = {}
        # A delta has one change per key.
        merged = {(name, key): change for name, key, change in changes}
        for (name, key), change in merged.items():
            done = self.model.change(name, key, change)
            self.tables[name].changes[key % GROUP_COUNT][key] = done
        for name, table in self.tables.items():
            delta = table.delta()
            if delta is not None:
                deltas[name] = delta
            table.promote()
        self.deltas.append(deltas)

    def write_base(self, pieces: int | None = None) -> bool:
        """Write a base; with `pieces` it is given up after as many."""
        left = pieces

        def pace() -> None:
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0:
                    raise BaseCancelledError

        base = self.backend.begin_base(self.tables, GROUPS)
        try:
            made = base.write(BaseTarget(self.store, 1, "op", self.epoch, self.folder, 0), pace)
        except BaseCancelledError:
            return False
        finally:
            base.close()
        if pieces is None:
            self.base = made.list_for(GROUPS, first_epoch=0, last_epoch=self.epoch)
            self.deltas = []
        return True

    def check(self) -> None:
        """The newest base and a slot that takes it have the job's state."""
        expected = self.model.content()
        assert read_batches({n: list(t.dump()) for n, t in self.tables.items()}) == expected
        if self.base is not None and not self.deltas:
            assert stored(self.store, self.base, self.folder) == expected
            self.lose_slot()
            assert read_batches({n: list(t.dump()) for n, t in self.tables.items()}) == expected


FEW_KEYS = EPOCH.map(lambda changes: [(name, key % 2, change) for name, key, change in changes])
STEPS = st.lists(
    st.tuples(st.just("run"), FEW_KEYS)
    | st.tuples(st.just("base"), st.none() | st.integers(0, 8))
    | st.tuples(st.just("lose"), st.none()),
    max_size=12,
)


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(steps=STEPS)
def test_bases_have_the_state_of_their_epoch_whatever_was_given_up_before(steps: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.backends.versioned.base._STEP_OPS", 1)
        job = Job("sqlite", folder)
        for step, of_step in steps:
            if step == "run":
                job.run(of_step)
            elif step == "lose":
                job.lose_slot()
            else:
                job.write_base(of_step)
                job.check()
        job.run([])
        assert job.write_base()
        job.check()
        job.backend.close()


def test_rows_that_another_slot_left_of_an_epoch_are_not_mixed_with_those_of_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slot removes expired state when it has time, so their rows differ."""
    job = Job("sqlite", str(tmp_path))
    job.run([("entries", 1, {"a": 1, "b": 2})])
    assert job.write_base()
    job.run([("value", 1, "a")])
    # As expiry does: in no delta. The header is written, and the entries are not.
    job.tables["entries"].rows[1].promote({1: {"a": ABSENT, "b": ABSENT}})
    monkeypatch.setattr("cairn.backends.versioned.base._STEP_OPS", 1)
    assert not job.write_base(pieces=2)
    job.lose_slot()
    assert not job.write_base(), "left to the next epoch"
    job.run([])
    assert job.write_base()
    job.check()
    job.backend.close()


@pytest.mark.parametrize("backend", VERSIONED)
@pytest.mark.parametrize("is_lost", [False, True], ids=["the same slot", "another slot"])
def test_a_list_that_became_shorter_after_a_base_was_given_up_is_short(
    backend: str, is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(backend, str(tmp_path))
    job.run([("value", 1, "a")])
    job.write_base()
    job.run([("items", 1, (0, [1, 2, 3, 4])), ("entries", 1, {"a": 1, "b": 2})])
    monkeypatch.setattr("cairn.backends.versioned.base._STEP_OPS", 1)
    assert not job.write_base(pieces=6)
    monkeypatch.undo()
    job.run([("items", 1, (1, [])), ("entries", 1, {"a": ABSENT})])
    if is_lost:
        job.lose_slot()
    job.write_base()
    job.check()
    job.backend.close()
