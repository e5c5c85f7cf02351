"""The newest epoch's output at a start, when the program has other sinks than the one before."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.driver.coordinator.output import Output, check_output
from cairn.errors import PlanError
from cairn.sinks import Collect, Console, Files, Foreach, Spark, Wal
from cairn.sinks.base import Sink, SinkContext, without_password
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch
from cairn.storage.published import is_known_published
from cairn.testing import SimulatedCrash, simulated_crash
from tests.places import SCHEMA
from tests.unit.driver.coordinator.leads import Lead
from tests.unit.driver.coordinator.manifests import epoch as make_epoch


def files(folder: Path) -> Files:
    sink = Files(str(folder))
    sink.open(SinkContext("job", "j", "out", SCHEMA))
    return sink


def epoch_for(target: str | None, *prepared: Any) -> Epoch:
    """An epoch with output of one sink; None is of a version that did not note the target."""
    targets = {} if target is None else {"out": target}
    return msgspec.structs.replace(
        make_epoch(5), committables={"out": list(prepared)}, targets=targets
    )


def checked(
    epoch: Epoch, *, is_published: bool = False, allow: bool = False, **sinks: Sink
) -> Output:
    return check_output(epoch, sinks, is_published=lambda: is_published, allow_dropped_output=allow)


def test_a_sink_publishes_again_what_was_prepared_for_its_target(tmp_path: Path) -> None:
    sink = files(tmp_path)
    for is_published in (True, False):
        epoch = epoch_for(sink.target, {})
        assert checked(epoch, out=sink, is_published=is_published) == (frozenset({"out"}), True)


def test_output_that_is_known_to_be_published_is_left_where_it_is(tmp_path: Path) -> None:
    epoch = epoch_for("files in file:///elsewhere", {})
    assert checked(epoch, is_published=True, out=files(tmp_path)) == (frozenset(), True)
    assert checked(epoch, is_published=True) == (frozenset(), True)


def test_output_that_would_be_lost_is_refused_with_both_targets(tmp_path: Path) -> None:
    sink, epoch = files(tmp_path), epoch_for("files in file:///elsewhere", {})
    with pytest.raises(PlanError) as refused:
        checked(epoch, out=sink)
    assert refused.value.facts == {
        "sink": "out",
        "epoch": 5,
        "expected": "files in file:///elsewhere",
        "found": f"files in file://{tmp_path}",
    }
    for said in ("file:///elsewhere", str(tmp_path), "next:", "allow_dropped_output=True"):
        assert said in str(refused.value)
    with pytest.raises(PlanError, match="the program has no such sink"):
        checked(epoch)


def test_output_is_given_up_where_the_user_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cairn"):
        assert checked(epoch_for("files in /a", {}), allow=True) == (frozenset(), False)
    assert "output of sink 'out' in epoch 5 for files in /a is not published" in caplog.text


def test_an_epoch_without_output_of_a_sink_lets_it_go(tmp_path: Path) -> None:
    assert checked(epoch_for("files in /a"), out=files(tmp_path)).is_whole
    assert checked(epoch_for("files in /a")) == (frozenset(), True)


def test_what_ends_with_the_driver_is_lost_to_nobody(tmp_path: Path) -> None:
    """A first look at the console, and then the sink that was meant."""
    epoch = epoch_for(Console().target, {"rows": 1, "arrow": ""})
    assert checked(epoch, out=files(tmp_path)) == (frozenset(), False)
    assert checked(epoch) == (frozenset(), False)
    assert checked(epoch, out=Collect()).sinks == {"out"}, "both keep rows of the same form"
    with pytest.raises(PlanError, match="the program publishes to the driver"):
        checked(epoch_for("files in /a", {}), out=Collect())


def test_an_epoch_of_a_version_that_noted_no_target_is_published_by_the_sink_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert checked(epoch_for(None, {}), out=files(tmp_path)) == (frozenset({"out"}), True)
    with caplog.at_level(logging.WARNING, "cairn"):
        assert checked(epoch_for(None, {})) == (frozenset(), False)
    assert "for an unknown target is not published" in caplog.text


def test_targets_say_which_place_and_never_a_secret(tmp_path: Path) -> None:
    assert files(tmp_path / "a").target != files(tmp_path / "b").target
    assert without_password("s3://key:secret@bucket/x") == "s3://key@bucket/x"
    assert without_password("abfss://c@account.dfs.core.windows.net/x").startswith("abfss://c@")
    writer = Spark("jdbc", dbtable="orders", url="jdbc:x?password=hunter2", password="hunter2")
    assert "orders" in writer.target and "hunter2" not in writer.target
    assert Spark("json", path="/a").target != Spark("json", path="/b").target
    assert Wal(print).target != Foreach(print).target


def test_an_epoch_notes_where_its_output_goes_and_the_note_outlives_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Lead(tmp_path)
    monkeypatch.setattr(type(lead.sink), "target", "here")
    lead.start()
    assert lead.run_batch((1, 5)).targets == {"out": "here"}
    assert lead.run_batch().targets == {}, "there is nothing to publish"
    newest = Log(lead.store).newest_epoch()
    assert newest is not None and newest.targets == {}
    lead.run_batch((1, 6))
    newest = Log(lead.store).newest_epoch()
    assert newest is not None and newest.targets == {"out": "here"}


def test_output_that_was_given_up_is_not_noted_as_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = Lead(tmp_path)
    monkeypatch.setattr(type(lead.sink), "target", "here")
    lead.start()
    with simulated_crash("driver.manifest.written"), pytest.raises(SimulatedCrash):
        lead.run_batch((1, 5))
    monkeypatch.setattr(type(lead.sink), "target", "there")
    with pytest.raises(PlanError, match="prepared for: here"):
        Lead(tmp_path, lead.store).start()
    dropped = Lead(tmp_path, lead.store, allow_dropped_output=True).start()
    assert dropped.sink.rows == []
    newest = dropped.coordinator.newest
    assert newest is not None and not is_known_published(Log(lead.store), newest)
    monkeypatch.setattr(type(lead.sink), "target", "here")
    back = Lead(tmp_path, lead.store).start()
    assert back.sink.rows == [(1, 1, 5)]
