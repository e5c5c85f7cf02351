"""What changes a job: with the control token only, and never to a path of the client's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from cairn.errors import PlanError
from cairn.storage.store import open_store
from tests.unit.snapshots.checkpoints import Checkpoint
from tests.unit.web.sites import CONTROL, TOKEN, FakeRun, client, site_of

ACTIONS = [("savepoint", {}), ("rescale", {"parallelism": 3}), ("rebalance", {}), ("stop", {})]


@pytest.fixture
def run(checkpoint: Checkpoint) -> FakeRun:
    return FakeRun(checkpoint)


def test_each_action_reaches_the_run(checkpoint: Checkpoint, run: FakeRun) -> None:
    asking = client(site_of(checkpoint, run, control_token=CONTROL), CONTROL)
    saved = asking.post("/api/control/savepoint", json={"name": "friday"})
    url = f"{checkpoint.store.url}-savepoints/friday"
    assert saved.json() == {"url": url, "epoch": 3, "rows": 5, "bytes": 100}
    rescaled = asking.post("/api/control/rescale", json={"parallelism": 4})
    assert (rescaled.status_code, rescaled.json()) == (202, {"parallelism": 4})
    stopped = asking.post("/api/control/stop", json={"savepoint": "last"})
    last = f"{checkpoint.store.url}-savepoints/last"
    assert (stopped.status_code, stopped.json()) == (202, {"stopping": True, "savepoint": last})
    for thread in threading.enumerate():
        if thread.name == "cairn-stop":
            thread.join()
    assert run.asked == [("savepoint", url), ("rescale", 4), ("stop", last)]
    assert asking.post("/api/control/stop", json={}).status_code == 409, "it has ended"


def test_savepoints_go_to_the_folder_that_was_configured(
    checkpoint: Checkpoint, run: FakeRun
) -> None:
    site = site_of(checkpoint, run, control_token=CONTROL, savepoints="s3://lake/saved/")
    answer = client(site, CONTROL).post("/api/control/savepoint", json={"name": "friday"})
    assert answer.json()["url"] == "s3://lake/saved/friday"
    unnamed = client(site, CONTROL).post("/api/control/savepoint", json={})
    assert unnamed.json()["url"].startswith("s3://lake/saved/2")


@pytest.mark.parametrize("action", ["savepoint", "stop"])
@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", "/etc/x", "..", ".", "", "a\x00b", "x" * 65, "s3://x", "a b", "ä", "-x", "a\n"],
)
def test_a_name_that_could_lead_elsewhere_is_refused(
    checkpoint: Checkpoint, run: FakeRun, action: str, name: str
) -> None:
    asking = client(site_of(checkpoint, run, control_token=CONTROL), CONTROL)
    field = "name" if action == "savepoint" else "savepoint"
    answer = asking.post(f"/api/control/{action}", json={field: name})
    assert answer.status_code == 400 and run.asked == []


@pytest.mark.parametrize(("action", "body"), ACTIONS)
@pytest.mark.parametrize("token", [None, TOKEN, "wrong-token-wrong"])
def test_without_the_control_token_nothing_changes(
    checkpoint: Checkpoint, run: FakeRun, action: str, body: Any, token: str | None
) -> None:
    site = site_of(checkpoint, run, token=TOKEN, control_token=CONTROL)
    answer = client(site, token).post(f"/api/control/{action}", json=body)
    assert answer.status_code == 401 and run.asked == []


@pytest.mark.parametrize(("action", "body"), ACTIONS)
def test_control_is_off_unless_it_has_a_token(
    checkpoint: Checkpoint, run: FakeRun, action: str, body: Any
) -> None:
    site = site_of(checkpoint, run)
    assert not site.has_control
    answer = client(site, CONTROL).post(f"/api/control/{action}", json=body)
    assert answer.status_code == 403 and run.asked == []
    assert client(site, CONTROL).get(f"/api/control/{action}").status_code == 405


@pytest.mark.parametrize(("action", "body"), ACTIONS)
def test_without_a_run_there_is_nothing_to_control(
    checkpoint: Checkpoint, action: str, body: Any
) -> None:
    site = site_of(checkpoint, control_token=CONTROL)
    answer = client(site, CONTROL).post(f"/api/control/{action}", json=body)
    assert answer.status_code == 409


@pytest.mark.parametrize("body", [{}, {"parallelism": 0}, {"parallelism": "3"}, {"x": 1}, [3]])
def test_a_parallelism_that_cannot_be_is_400(
    checkpoint: Checkpoint, run: FakeRun, body: Any
) -> None:
    asking = client(site_of(checkpoint, run, control_token=CONTROL), CONTROL)
    assert asking.post("/api/control/rescale", json=body).status_code == 400
    assert run.asked == []


def test_what_the_run_refuses_is_told(
    checkpoint: Checkpoint, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(parallelism: int) -> None:
        raise PlanError("parallelism must be between 1 and 8\n  next: ask for less")

    monkeypatch.setattr(run, "rescale", refuse)
    asking = client(site_of(checkpoint, run, control_token=CONTROL), CONTROL)
    answer = asking.post("/api/control/rescale", json={"parallelism": 9})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "code": "bad-request",
        "message": "parallelism must be between 1 and 8",
        "next": "ask for less",
    }


def test_a_second_change_at_once_is_told_to_wait(
    checkpoint: Checkpoint, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_of(checkpoint, run, control_token=CONTROL)
    asking = client(site, CONTROL)
    seen = []

    def savepoint(path: str) -> Any:
        seen.append(asking.post("/api/control/rescale", json={"parallelism": 3}).status_code)
        return FakeRun.savepoint(run, path)

    monkeypatch.setattr(run, "savepoint", savepoint)
    assert asking.post("/api/control/savepoint", json={}).status_code == 200
    assert seen == [409]
    assert asking.post("/api/control/rescale", json={"parallelism": 3}).status_code == 202


def test_a_stop_whose_savepoint_cannot_be_is_refused_and_nothing_stops(
    checkpoint: Checkpoint, run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "saved")
    site = site_of(checkpoint, run, control_token=CONTROL, savepoints=folder)
    open_store(f"{folder}/friday").put("savepoint.json", b"{}")
    asking = client(site, CONTROL)
    taken = asking.post("/api/control/stop", json={"savepoint": "friday"})
    assert taken.status_code == 409 and "another savepoint" in taken.json()["error"]["message"]

    def deleted(savepoint: str | None = None) -> None:
        raise PlanError("the checkpoint is deleted when this run stops\n  next: save first")

    def away(savepoint: str | None = None) -> None:
        raise OSError("secret-host is away")

    monkeypatch.setattr(run, "check_stop", deleted)
    assert asking.post("/api/control/stop", json={"savepoint": "x"}).status_code == 400
    monkeypatch.setattr(run, "check_stop", away)
    away_now = asking.post("/api/control/stop", json={"savepoint": "x"})
    assert away_now.status_code == 409 and "secret-host" not in away_now.text
    assert run.asked == [] and run.status == "running"
    assert not (tmp_path / "saved" / "x").exists()
    assert asking.post("/api/control/rescale", json={"parallelism": 3}).status_code == 202


def test_nothing_else_is_changed_until_the_stop_is_done(
    checkpoint: Checkpoint, run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def stop(savepoint: str | None = None) -> None:
        may_end.wait(20)
        raise OSError("it could not be stopped")

    monkeypatch.setattr(run, "stop", stop)
    asking = client(site_of(checkpoint, run, control_token=CONTROL), CONTROL)
    assert asking.post("/api/control/stop", json={}).status_code == 202
    for action, body in ACTIONS:
        busy = asking.post(f"/api/control/{action}", json=body)
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "busy")
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "cairn-stop":
            thread.join()
    assert asking.post("/api/control/rescale", json={"parallelism": 3}).status_code == 202
