"""Timers are state: savepoints carry them, offline commands show them, evolution guards them."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from typer.testing import CliRunner

from cairn import KeyedProcess, state
from cairn.cli import app
from cairn.driver.coordinator.resume import check_resume
from cairn.errors import StateSchemaError
from cairn.functions import find_states
from cairn.protocol.scoped_state import ScopedState, states_by_scope
from cairn.protocol.spec import InletSpec, OperatorSpec
from cairn.snapshots import EpochReader
from cairn.storage.store import open_store
from cairn.types import parse_schema
from tests.backends import MORE_IN_SOAK, backend_name
from tests.simulation.reminders import TimedDriver, TimedWorld
from tests.simulation.world import stored_state
from tests.unit.driver.coordinator.manifests import entry, epoch
from tests.unit.snapshots.checkpoints import GONE, Checkpoint, mapped, state_of, value
from tests.unit.snapshots.jobs import by_key, newest, start_from, take


@pytest.fixture
def world(tmp_path: Path) -> TimedWorld:
    world = TimedWorld(5, tmp_path)
    driver = TimedDriver(world, parallelism=2)
    driver.start()
    for _ in range(8):
        driver.run_batch()
    world.check_output()
    return world


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@pytest.mark.parametrize("parallelism", [1, 3])
def test_timers_set_before_a_savepoint_are_called_after_it_at_another_parallelism(
    parallelism: int, backend: str, world: TimedWorld, tmp_path: Path
) -> None:
    assert world.timed.event and world.timed.processing
    (tmp_path / "again").mkdir()
    again = TimedWorld(world.seed, tmp_path / "again", backend=backend_name(backend))
    again.clock.advance_ms(world.clock.now_ms - again.clock.now_ms)
    again.store = start_from(take(world), parallelism)
    loaded = newest(again)
    assert stored_state(again.store, again.graph(), loaded) == world.timed.state()
    again.began[loaded.number] = world.began[newest(world).number]
    again._applied.add(loaded.number)
    again.timed = copy.deepcopy(world.timed)
    again.timed.told, again.timed.counted = Counter(), Counter()
    driver = TimedDriver(again, parallelism=parallelism)
    driver.start()
    for _ in range(5):
        again.clock.advance_ms(3000)
        driver.run_batch()
        again.check_output()
    set_before = {(time, k) for time, k in world.timed.event | world.timed.processing}
    assert set_before & {(time, k) for k, _, time, _ in again.timed.told}
    assert stored_state(again.store, again.graph(), newest(again)) == again.timed.state()


def test_readers_and_savepoints_show_timers(world: TimedWorld) -> None:
    expected = world.timed.state()
    with EpochReader(world.store, newest(world)) as reader:
        assert by_key(reader, ["remind", "between"]) == expected
    assert by_key(take(world), ["remind", "between"]) == expected


def call(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_offline_commands_take_the_names_of_timers(tmp_path: Path) -> None:
    url = str(tmp_path / "ckpt")
    made = Checkpoint(
        {"n": value("bigint"), "timers.event": mapped("bigint", "boolean")}, store=open_store(url)
    )
    made.commit({"timers.event": {1: {5: True, 7: True}, 2: {5: True}}})
    made.commit({"timers.event": {1: {5: GONE}, 2: GONE, 3: {9: True}}})
    assert "timers.event" in call("show", url)
    assert "timers.event" in call("diff", url, 2, 3)
    call("verify", url)
    written = json.loads(call("savepoint", url, tmp_path / "saved", "--json"))
    assert written["operators"]["count"]["timers.event"] == 2
    assert list((tmp_path / "saved/state/count/timers.event").glob("*.parquet"))
    with EpochReader(made.store, newest_of(made)) as reader:
        assert state_of(reader)["timers.event"] == {1: {7: True}, 3: {9: True}}


def newest_of(made: Checkpoint) -> Any:
    assert made.newest is not None
    return made.newest


class Without(KeyedProcess[Any]):
    n = state.Value("long")

    def process(self, row: Any, ctx: Any) -> None:
        pass


class With(Without):
    def on_timer(self, time_ms: int, ctx: Any) -> None:
        pass


def test_timers_are_declared_by_functions_that_say_what_they_do() -> None:
    assert set(find_states(Without())) == {"n"}
    assert set(find_states(With())) == {"n", "timers.event", "timers.processing"}


def resume(before: KeyedProcess[Any], after: KeyedProcess[Any], **more: Any) -> frozenset[str]:
    """Which operators are written anew when a job goes on with another function."""
    spec = OperatorSpec(
        "op", (InletSpec(0, parse_schema("k long"), ("k",)),), cloudpickle.dumps(before), ()
    )
    held = epoch(41, entry(uid="op", keys={"k": "bigint"}, states=states_by_scope(spec)[0].decls))
    given = {"allow_dropped_state": False, **more}
    declared = ScopedState("op", "keyed", {"k": "bigint"}, find_states(after))
    return check_resume(held, {"op": declared}, job_name="j", url="", **given)


def test_a_function_may_gain_timers() -> None:
    assert resume(Without(), With()) == frozenset()


def test_a_function_that_loses_its_timers_is_refused_unless_they_may_be_lost() -> None:
    with pytest.raises(StateSchemaError, match=r"'timers.event'(.|\n)*give it on_timer\(\) again"):
        resume(With(), Without())
    assert resume(With(), Without(), allow_dropped_state=True) == {"op"}
