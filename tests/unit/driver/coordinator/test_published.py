"""The checkpoint alone proves that an epoch is published, or it is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.errors import CommitError
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch
from cairn.storage.paths import PUBLISHED_FOLDER
from cairn.storage.published import is_known_published, is_published, note_published
from cairn.testing import Fault, SimulatedCrash, simulated_crash
from tests.unit.driver.coordinator.leads import Lead


def known(lead: Lead) -> dict[int, bool]:
    """Per epoch that is kept: what somebody who looks at the checkpoint knows."""
    log = Log(lead.store)
    epochs = [record for record in log.records() if isinstance(record, Epoch)]
    return {epoch.number: is_known_published(log, epoch) for epoch in epochs}


def notes(lead: Lead) -> list[str]:
    return [there.path for there in lead.store.list(PUBLISHED_FOLDER)]


def test_an_epoch_is_known_to_be_published_once_it_has_a_child(lead: Lead) -> None:
    lead.run_batch((1, 5))
    assert known(lead) == {2: False}
    lead.run_batch((1, 5))
    assert known(lead) == {2: True, 3: False}
    assert notes(lead) == [], "an epoch costs no write of its own"


def test_a_note_of_the_newest_epoch_replaces_the_one_before(lead: Lead) -> None:
    lead.run_batch((1, 5))
    lead.coordinator.note_published()
    assert known(lead) == {2: True}
    lead.run_batch((1, 5))
    lead.coordinator.note_published()
    assert known(lead) == {2: True, 3: True}
    assert notes(lead) == ["published/000000000003.json"]


def test_noting_an_epoch_again_writes_nothing(lead: Lead) -> None:
    lead.run_batch((1, 5))
    lead.coordinator.note_published()
    puts = lead.store.calls["put"]
    lead.coordinator.note_published()
    assert lead.store.calls["put"] == puts


def test_a_driver_that_dies_before_its_sinks_publish_notes_nothing(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    lead.run_batch((1, 5))
    with simulated_crash("driver.manifest.written"), pytest.raises(SimulatedCrash):
        lead.run_batch((1, 5))
    lead.coordinator.note_published()
    assert known(lead) == {2: True, 3: False}


def test_a_start_publishes_the_newest_epoch_and_notes_it(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    with simulated_crash("driver.manifest.written"), pytest.raises(SimulatedCrash):
        lead.run_batch((1, 5))
    after = Lead(tmp_path, lead.store).start()
    assert after.sink.rows == [(1, 1, 5)]
    assert known(after) == {2: True}


def test_a_sink_that_fails_at_a_start_leaves_the_epoch_unpublished(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    with simulated_crash("driver.manifest.written"), pytest.raises(SimulatedCrash):
        lead.run_batch((1, 5))
    after = Lead(tmp_path, lead.store)
    after.sink.failures = 1000
    with pytest.raises(CommitError):
        after.start()
    assert known(after) == {2: False}


def test_a_program_without_the_sink_does_not_note_its_output_as_published(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    with simulated_crash("driver.manifest.written"), pytest.raises(SimulatedCrash):
        lead.run_batch((1, 5))
    without = Lead(tmp_path, lead.store)
    without.coordinator._publisher.sinks.clear()
    without.start()
    assert known(without) == {2: False}, "the sink may come back before the next epoch"
    assert Lead(tmp_path, lead.store).start().sink.rows == [(1, 1, 5)]


@pytest.mark.parametrize("guarantee", ["at-least-once", "at-most-once"])
def test_output_published_before_the_record_needs_no_note(tmp_path: Path, guarantee: str) -> None:
    lead = Lead(tmp_path, guarantee=guarantee).start()
    lead.run_batch((1, 5))
    lead.coordinator.note_published()
    assert known(lead) == {2: True} and notes(lead) == []


def test_an_epoch_without_output_is_published(lead: Lead) -> None:
    lead.run_batch()
    assert known(lead) == {2: True}
    lead.coordinator.note_published()
    assert notes(lead) == [], "it needs no note"


def test_a_note_that_cannot_be_written_fails_nothing(lead: Lead) -> None:
    lead.run_batch((1, 5))
    lead.store.plan(Fault("put", lead.store.calls["put"] + 1, "before"))
    lead.coordinator.note_published()
    assert known(lead) == {2: False}
    lead.coordinator.note_published()
    assert known(lead) == {2: True}


def test_an_old_note_that_cannot_be_deleted_leaves_the_new_one(
    lead: Lead, caplog: pytest.LogCaptureFixture
) -> None:
    lead.run_batch((1, 5))
    lead.coordinator.note_published()
    lead.run_batch((1, 5))
    lead.store.plan(Fault("delete", lead.store.calls["delete"] + 1, "before"))
    lead.coordinator.note_published()
    assert known(lead) == {2: True, 3: True}
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("the old note of epoch 2 could not be deleted")


def test_a_note_of_another_record_or_a_damaged_one_proves_nothing(lead: Lead) -> None:
    epoch = lead.run_batch((1, 5))
    note_published(lead.store, epoch.number, "another")
    assert not is_published(lead.store, epoch.number, epoch.nonce)
    lead.store.put("published/000000000002.json", b"{")
    assert not is_published(lead.store, epoch.number, epoch.nonce)
    assert known(lead) == {2: False}


def test_the_first_epoch_of_a_driver_removes_notes_of_epochs_that_are_gone(tmp_path: Path) -> None:
    lead = Lead(tmp_path).start()
    lead.run_batch((1, 5))
    lead.coordinator.note_published()
    after = Lead(tmp_path, lead.store).start()
    for _ in range(60):
        after.run_batch((1, 5))
    assert min(known(after)) > 2
    last = Lead(tmp_path, lead.store).start()
    newest = last.coordinator.newest
    assert newest is not None
    assert notes(last) == [f"published/{number:012d}.json" for number in (2, newest.number)]
    last.run_batch((1, 5))
    assert notes(last) == [f"published/{newest.number:012d}.json"]
