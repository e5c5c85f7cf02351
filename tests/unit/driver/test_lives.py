"""The lives of a run, with a group, a standby and engines that only note what is asked of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.driver import lives as module
from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.lives import Lives
from cairn.driver.options import Options
from cairn.driver.restarts import parse_restart
from cairn.errors import CommitConflictError, EpochError, PlanError
from cairn.storage.log import Log
from cairn.storage.notes import read_group, read_restarts, write_group
from cairn.storage.store import open_store
from tests.led_log import append_epoch

GRAPH: Any = SimpleNamespace(name="job")


class Grant:
    only_if_last = None

    def __init__(self) -> None:
        self.lost = threading.Event()
        self.resigned_to: list[str | None] = []

    def confirm(self, term: int) -> None: ...

    def resign(self, to: str | None = None) -> None:
        self.resigned_to.append(to)
        self.lost.set()


class Group:
    """Grants the lead when it is told to."""

    url = "fake:"

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.may_lead = threading.Semaphore(0)
        self.others: list[Member] = []
        self.updates: list[Member] = []
        self.is_closed = False

    def campaign(self, member: Member, stop: threading.Event) -> Grant | None:
        while not self.may_lead.acquire(timeout=0.01):
            if stop.is_set():
                return None
        self.grants.append(Grant())
        return self.grants[-1]

    def update(self, member: Member) -> None:
        self.updates.append(member)

    def leader(self) -> Member | None:
        return None

    def waiting(self) -> list[Member]:
        return self.others

    def close(self) -> None:
        self.is_closed = True


class Engine:
    """A life that ends when it is told to."""

    def __init__(self, term: int) -> None:
        self.ended = threading.Event()
        self.turn = SimpleNamespace(error=None)
        self.coordinator = SimpleNamespace(newest=None, term=term)
        self.ended_as: str | None = None
        self.status = "running"
        self.waiting_calls = 0

    @contextmanager
    def count_waiting(self) -> Iterator[None]:
        self.waiting_calls += 1
        yield

    def end(self, error: BaseException | None = None) -> None:
        self.turn.error = error
        self.ended_as = "stopped" if error is None else "failed"
        self.ended.set()

    def stop(self) -> None:
        self.end()

    def abandon(self) -> None:
        self.end(CommitConflictError("lost"))


class World:
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, checkpoint: str = "memory:", **options: Any
    ) -> None:
        self.group, self.engines, self.failures = Group(), [], []
        self.standbys_closed = self.ends = 0
        self.is_slow: threading.Event | None = None
        self.is_spark_gone = False
        world = self

        class Standby:
            epoch = 7

            def __init__(self, *_: Any) -> None: ...
            def begin(self, granted: threading.Event) -> None: ...
            def refusal(self) -> None: ...
            def close(self) -> None:
                world.standbys_closed += 1

        monkeypatch.setattr(module, "Standby", Standby)
        monkeypatch.setattr(module, "open_leadership", lambda url, store: self.group)
        self.began = threading.Semaphore(0)
        self.lives: Lives[Any] = Lives(
            GRAPH,
            Options(checkpoint=checkpoint, **options),
            begin_life=self.begin_life,
            url=None,
            on_end=self.note_end,
            is_spark_gone=lambda: self.is_spark_gone,
        )

    def begin_life(self, standby: Any, grant: Any) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        self.engines.append(Engine(term=len(self.engines)))
        self.began.release()
        if self.is_slow is not None:
            assert self.is_slow.wait(10)
        return SimpleNamespace(engine=self.engines[-1])

    def note_end(self) -> None:
        self.ends += 1

    def await_life(self) -> Engine:
        assert self.began.acquire(timeout=10), "no life began"
        engine: Engine = self.engines[-1]
        return engine


@pytest.fixture
def led(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(monkeypatch, ha="fake:")
    world.group.may_lead.release()
    world.lives.begin()
    world.await_life()
    return world


def await_status(lives: Lives[Any], status: str) -> None:
    for _ in range(1000):
        if lives.status == status:
            return
        threading.Event().wait(0.01)
    raise AssertionError(lives.status)


def await_note(is_there: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_there():
            return
        threading.Event().wait(0.01)
    raise AssertionError("no such note")


def test_a_lead_that_is_lost_ends_the_life_and_the_run_waits_for_the_next(led: World) -> None:
    led.group.grants[0].lost.set()
    await_status(led.lives, "standby")
    assert len(led.engines) == 1 and not led.lives.ended.is_set()
    led.group.may_lead.release()
    led.await_life().end()
    assert led.lives.wait(10)
    assert (led.ends, led.group.is_closed) == (1, True)


def test_a_driver_that_is_fenced_resigns_before_it_waits_again(led: World) -> None:
    led.engines[0].end(CommitConflictError("another driver"))
    await_status(led.lives, "standby")
    assert led.group.grants[0].resigned_to == [None]
    led.lives.stop()
    assert (led.lives.status, led.lives.error) == ("stopped", None)


def test_a_takeover_that_another_member_won_is_followed_by_another_campaign(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, ha="fake:")
    world.failures.append(CommitConflictError("another member"))
    world.group.may_lead.release(2)
    world.lives.begin()
    world.await_life()
    assert len(world.group.grants) == 2 and world.standbys_closed == 1
    assert world.group.grants[0].lost.is_set(), "it does not keep a lead that it could not use"
    world.lives.stop()


def test_a_program_that_is_refused_resigns_and_raises_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, ha="fake:", restart="exponential(1 second, 1 minute)")
    world.failures.append(PlanError("does not fit"))
    world.group.may_lead.release()
    with pytest.raises(PlanError, match="does not fit"):
        world.lives.begin()
    assert world.group.grants[0].lost.is_set() and world.group.is_closed


def test_a_run_that_is_stopped_in_standby_leads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, ha="fake:")
    beginning = threading.Thread(target=world.lives.begin)
    beginning.start()
    await_status(world.lives, "standby")
    world.lives.stop()
    beginning.join(10)
    assert not beginning.is_alive() and world.engines == []
    assert (world.lives.status, world.lives.ended_as) == ("stopped", "stopped")


def test_a_run_that_is_stopped_while_its_next_life_begins_ends_that_life(led: World) -> None:
    led.is_slow = threading.Event()
    led.group.grants[0].lost.set()
    led.group.may_lead.release()
    second = led.await_life()
    stopping = threading.Thread(target=led.lives.stop)
    stopping.start()
    while not led.lives._stopping.is_set():
        threading.Event().wait(0.01)
    led.is_slow.set()
    stopping.join(10)
    assert second.ended_as == "stopped" and led.lives.ended.is_set()


def test_a_standby_that_cannot_be_made_now_is_made_after_a_pause(
    led: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, failures = module.Standby, [OSError("the store is away")]

    def make(*options: Any) -> Any:
        if failures:
            raise failures.pop()
        return made(*options)

    monkeypatch.setattr(module, "Standby", make)
    led.lives._restarts.policy = parse_restart("fixed(1, 10 ms)")
    led.group.grants[0].lost.set()
    led.group.may_lead.release()
    led.await_life()
    assert not failures and led.lives.restarts == 1
    led.lives.stop()


def test_a_driver_that_has_led_stays_a_standby_while_the_store_is_away(
    led: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without restarts too: a standby has not failed, and its program has run before."""
    made = module.Standby
    failures: list[Exception] = [OSError("the store is away"), OSError("still away")]

    def make(*options: Any) -> Any:
        if failures:
            raise failures.pop()
        return made(*options)

    monkeypatch.setattr(module, "Standby", make)
    monkeypatch.setattr(module, "STANDBY_AGAIN_S", 0.01)
    led.group.grants[0].lost.set()
    led.group.may_lead.release()
    led.await_life()
    assert not failures and led.lives.restarts == 0
    failures.append(PlanError("does not fit"))
    led.group.grants[1].lost.set()
    with pytest.raises(PlanError, match="does not fit"):
        led.lives.wait(10)


def test_restarts_of_a_standby_are_counted_after_a_long_life(
    led: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The life was quiet, the tries to wait again are not."""

    def make(*_: Any) -> Any:
        raise OSError("the store is away")

    monkeypatch.setattr(module, "Standby", make)
    monkeypatch.setattr(module, "STANDBY_AGAIN_S", 0.01)
    restarts = led.lives._restarts
    restarts.policy = parse_restart("fixed(2, 10 ms)")
    restarts._began_s -= 2 * restarts.policy.quiet_s
    led.group.grants[0].lost.set()
    for _ in range(100):
        threading.Event().wait(0.01)
    assert restarts.count == 2
    led.lives.stop()


@pytest.mark.parametrize("restart", ["none", "exponential(1 ms, 1 ms)"])
def test_a_driver_can_be_stopped_while_the_store_is_away(
    monkeypatch: pytest.MonkeyPatch, restart: str
) -> None:
    world = World(monkeypatch, ha="fake:", restart=restart)
    world.group.may_lead.release()
    world.lives.begin()
    world.await_life()
    has_failed = threading.Event()

    def make(*options: Any) -> Any:
        has_failed.set()
        raise OSError("the store is away")

    monkeypatch.setattr(module, "Standby", make)
    world.group.grants[0].lost.set()
    assert has_failed.wait(10)
    world.lives.stop()
    assert world.lives.ended.is_set() and world.lives.status == "stopped"


def test_a_standby_that_becomes_the_leader_describes_itself_once(led: World) -> None:
    """The thread that describes the standby must not write over what the leader has written."""
    leading = led.group.updates[-1]
    assert leading.epoch is None and leading.refusal is None
    led.lives._keep_described(SimpleNamespace(refusal=lambda: "late", epoch=7), granted())
    assert led.group.updates[-1] is leading
    led.lives.stop()


def granted() -> Any:
    """An event that is set between the first look at it and the second."""
    event = threading.Event()
    looks = iter([False, True])
    return SimpleNamespace(wait=lambda timeout: event.is_set() or next(looks), is_set=lambda: True)


def test_sources_are_reset_in_the_lives_before_the_first_epoch_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path))
    log = Log(store)
    options = {"checkpoint": str(tmp_path), "reset_sources": ("rows",)}
    world = World(monkeypatch, restart="fixed(5, 10 ms)", **options)
    seen: list[bool] = []
    begin_life = world.begin_life

    def begin(standby: Any, grant: Any) -> Any:
        seen.append(world.lives.has_committed)
        life = begin_life(standby, grant)
        life.engine.coordinator.term = log.take_over(host="h", pid=1, wall_ms=0).term
        return life

    world.lives._begin_life = begin
    append_epoch(log, log.take_over(host="h", pid=1, wall_ms=0).term)
    world.lives.begin()
    world.await_life().end(OSError("before the first epoch of this run"))
    second = world.await_life()
    while len(seen) < 2 or world.lives.status == "restarting":
        threading.Event().wait(0.01)
    append_epoch(log, second.coordinator.term)
    second.end(OSError("after it"))
    world.await_life().end()
    assert world.lives.wait(10) and seen == [False, False, True]


def test_the_lead_is_passed_to_a_standby_that_would_not_be_refused(led: World) -> None:
    with pytest.raises(EpochError, match="no standby"):
        led.lives.resign()
    refused = Member(identity="refused", host="a", pid=1, refusal="does not fit")
    led.group.others = [refused]
    with pytest.raises(EpochError, match="a would be refused: does not fit"):
        led.lives.resign()
    warm = Member(identity="warm", host="b", pid=2)
    hot = Member(identity="hot", host="c", pid=3, standby="hot", epoch=9)
    behind = Member(identity="behind", host="d", pid=4, standby="hot", epoch=8)
    led.group.others = [refused, warm, behind, hot]
    assert led.lives.resign() is hot
    await_status(led.lives, "standby")
    assert led.group.grants[0].resigned_to == ["hot"]
    with pytest.raises(EpochError, match="does not lead"):
        led.lives.resign()
    led.lives.stop()


@pytest.mark.parametrize("to", ["b", "warm"])
def test_the_lead_is_passed_to_the_standby_that_was_chosen(led: World, to: str) -> None:
    warm = Member(identity="warm", host="b", pid=2)
    led.group.others = [warm, Member(identity="hot", host="c", pid=3, standby="hot")]
    with pytest.raises(EpochError, match=r"'d': waiting: b, c"):
        led.lives.resign("d")
    assert led.lives.resign(to) is warm
    led.lives.stop()


def test_a_driver_whose_next_life_only_begins_passes_no_lead_on(led: World) -> None:
    led.group.others = [Member(identity="other", host="b", pid=2)]
    led.is_slow = threading.Event()
    led.group.grants[0].lost.set()
    led.group.may_lead.release()
    led.await_life()
    with pytest.raises(EpochError, match="does not lead"):
        led.lives.resign()
    led.is_slow.set()
    await_status(led.lives, "running")
    assert led.lives.resign().identity == "other"
    await_status(led.lives, "standby")
    assert led.group.grants[1].resigned_to == ["other"]
    led.lives.stop()


def test_a_driver_whose_spark_is_gone_ends_and_leaves_the_lead_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, ha="fake:", restart="exponential(1 second, 5 minutes)")
    world.group.may_lead.release()
    world.lives.begin()
    engine = world.await_life()
    world.is_spark_gone = True
    engine.end(OSError("the JVM does not answer"))
    with pytest.raises(EpochError, match="Spark of this driver has ended") as raised:
        world.lives.wait(10)
    assert isinstance(raised.value.__cause__, OSError)
    assert world.group.grants[0].lost.is_set() and world.group.is_closed
    assert world.lives.restarts == 0


def test_a_standby_whose_spark_is_gone_does_not_wait_for_the_lead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STANDBY_S", 0.01)
    world = World(monkeypatch, ha="fake:", restart="exponential(1 second, 5 minutes)")
    world.is_spark_gone = True
    with pytest.raises(EpochError, match="Spark of this driver has ended"):
        world.lives.begin()
    assert world.engines == [] and world.group.is_closed and world.standbys_closed == 1


def test_a_run_without_a_group_ends_when_its_spark_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, restart="exponential(1 second, 5 minutes)")
    world.lives.begin()
    engine = world.await_life()
    world.is_spark_gone = True
    engine.end(OSError("the JVM does not answer"))
    with pytest.raises(EpochError, match="start the process again"):
        world.lives.wait(10)
    assert len(world.engines) == 1


def test_a_leader_shows_since_when_it_leads_and_where_the_group_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch, checkpoint=str(tmp_path), ha="fake:")
    world.group.others = [Member(identity="other", host="b", pid=2)]
    beginning = threading.Thread(target=world.lives.begin)
    beginning.start()
    await_status(world.lives, "standby")
    waiting = world.lives.group()
    assert waiting is not None and waiting.leader is None and waiting.this is not None
    world.group.may_lead.release()
    world.await_life()
    beginning.join(10)
    leading = world.lives.group()
    assert leading is not None and leading.leader == leading.this == world.group.updates[-1]
    assert leading.leader is not None and leading.leader.since_ms >= waiting.this.since_ms
    assert leading.standbys == world.group.others
    await_note(lambda: read_group(open_store(str(tmp_path))) == "fake:")
    world.lives.stop()


def test_a_run_without_a_group_removes_the_note_of_an_earlier_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path))
    write_group(store, 3, "store:?lease=10s")
    world = World(monkeypatch, checkpoint=str(tmp_path))
    world.engines += [Engine(term) for term in range(4)]
    world.lives.begin()
    assert world.await_life().coordinator.term == 4
    await_note(lambda: read_group(store) is None)


def test_a_start_that_may_succeed_later_is_repeated_and_then_lives_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, restart="fixed(2, 10 ms)")
    world.failures.append(OSError("the store is away"))
    world.lives.begin()
    world.await_life().end(OSError("away again"))
    world.await_life().end(OSError("and again"))
    with pytest.raises(OSError, match="and again"):
        world.lives.wait(10)
    assert (world.lives.restarts, len(world.engines), world.ends) == (2, 2, 1)


def test_restarts_are_kept_with_cause_and_pause_here_and_in_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World(monkeypatch, checkpoint=str(tmp_path), restart="fixed(2, 20 ms)")
    world.lives.begin()
    world.await_life().end(OSError("the store is away\n  next: wait"))
    world.await_life().end(ValueError())
    world.await_life().end()
    assert world.lives.wait(10)
    found = list(world.lives.restart_history)
    assert [(each.number, each.kind, each.cause, each.pause_ms) for each in found] == [
        (1, "OSError", "the store is away", 20),
        (2, "ValueError", "ValueError", 20),
    ]
    await_note(lambda: read_restarts(open_store(str(tmp_path))) == found[::-1])


def test_a_run_without_restarts_has_one_life(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.lives.begin()
    assert not world.lives.is_repeated and world.group.grants == []
