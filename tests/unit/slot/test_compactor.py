"""Background work rests between its pieces, unless memory waits for it."""

from __future__ import annotations

import threading
import time

import pytest

from cairn.errors import EpochError
from cairn.slot import compactor as compactor_module
from cairn.slot.compactor import Compactor, Failure, Pace, Work


@pytest.mark.parametrize("is_urgent", [False, True])
def test_work_that_memory_waits_for_takes_no_rest(
    is_urgent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(compactor_module.time, "sleep", rests.append)
    ended = threading.Event()

    def run(pace: Pace) -> None:
        for _ in range(3):
            until = time.monotonic() + 0.001
            while time.monotonic() < until:
                pass
            pace()
        ended.set()

    compactor = Compactor(lambda: True)
    compactor.submit(Work("op", run, lambda: None, lambda: is_urgent))
    assert ended.wait(10)
    compactor.close()
    assert len(rests) == (0 if is_urgent else 3)
    assert all(rest >= 0.009 for rest in rests), "nine times as long as it has worked"


def test_what_is_waited_for_takes_no_rest_and_its_failure_is_known_until_work_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compactor_module, "REST_BUSY", 1e9)
    monkeypatch.setattr(compactor_module, "REST_MAX_S", 60)
    begun = threading.Event()

    def fail(pace: Pace) -> None:
        begun.set()
        for _ in range(50):
            time.sleep(0.01)
            if compactor._waiters:
                pace()
        raise EpochError("the server is away\n  next: repair it", database="there", is_away=True)

    compactor = Compactor(lambda: True)
    assert not compactor.wait("op", lambda: None), "there is nothing to wait for"
    compactor.submit(Work("op", fail, lambda: None))
    assert begun.wait(10)
    assert compactor.wait("op", lambda: None)
    assert compactor.last_failure("op") == Failure("the server is away", "there")
    assert not compactor.is_free("op") and compactor.is_free("op", rests=False)
    compactor.submit(Work("op", lambda pace: None, lambda: None))
    compactor.wait("op", lambda: None)
    assert compactor.last_failure("op") is None
    compactor.close()


def test_who_waits_for_work_may_give_up() -> None:
    ended = threading.Event()
    compactor = Compactor()
    compactor.submit(Work("op", lambda pace: ended.wait(10) and None, lambda: None))

    def check() -> None:
        raise EpochError("the attempt is superseded")

    with pytest.raises(EpochError, match="superseded"):
        compactor.wait("op", check)
    ended.set()
    compactor.close()


def test_a_failure_is_forgotten_when_the_state_becomes_another_one() -> None:
    def fail(pace: Pace) -> None:
        raise OSError

    compactor = Compactor(threaded=False)
    compactor.submit(Work("op", fail, lambda: None))
    assert compactor.wait("op", lambda: None)
    assert compactor.last_failure("op") == Failure("OSError", "")
    compactor.cancel("op")
    assert compactor.last_failure("op") is None
