"""Sites to ask: a checkpoint of a few epochs, a run that is not Spark's, and clients."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.coordinator.reports import report_of
from cairn.driver.group import Group, choose_successor
from cairn.driver.roster import SlotInfo
from cairn.driver.serving import Serve
from cairn.errors import EpochError
from cairn.report.balance import Balance
from cairn.report.epoch import EpochReport
from cairn.report.scaling import Decision, ScalingReport
from cairn.report.status import Restart
from cairn.snapshots.destination import check_destination
from cairn.storage.store import open_store
from cairn.web.app import make_app
from cairn.web.site import Site
from tests.unit.snapshots.checkpoints import GONE, UID, Checkpoint, listed, mapped, value

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

TOKEN = "a-token-for-reading"
CONTROL = "a-token-for-control"
STATES = {
    "n": value("bigint"),
    "items": listed("string"),
    "last": mapped("string", "double"),
    "at": value("timestamp"),
    "raw": value("binary"),
}


def make_checkpoint(folder: Path, keys: int = 40) -> Checkpoint:
    """Epochs 2 and 3 of 40 keys: key 0 changed, key 1 is gone, key 100 came."""
    made = Checkpoint(STATES, store=open_store(str(folder)))
    made.commit(
        {
            "n": {k: k * 10 for k in range(keys)},
            "items": {1: ["a", "b"]},
            "last": {1: {"x": 0.5, "y": float("nan")}},
            "raw": {1: b"\x00\xff"},
        }
    )
    made.commit({"n": {0: 2**60, 1: GONE, 100: 1000}, "items": {2: ["c"]}})
    return made


class FakeRun:
    """A run as a site sees it, over a checkpoint; answers `n` alone, from the newest epoch."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.name = "shop"
        self.error: BaseException | None = None
        self.status = "running"
        self.paused: str | None = None
        self.parallelism = 2
        self.restarts = 3
        self.failovers = 1
        self.restarted: list[Restart] = []
        self.drivers: Group | None = None
        self.is_waiting = False
        self.asked: list[Any] = []
        self.has_epoch = True
        self._checkpoint = checkpoint

    def metrics(self) -> EpochReport | None:
        newest = self._checkpoint.newest
        if newest is None:
            return None
        return msgspec.structs.replace(report_of(newest, 1.5), dropped_batches=0)

    def group(self) -> Group | None:
        return self.drivers

    def resign(self, to: str | None = None) -> Member:
        self.asked.append(("resign", to))
        waiting = [] if self.drivers is None else self.drivers.standbys
        return choose_successor(waiting, to, self.name)

    def restart_history(self) -> list[Restart]:
        return self.restarted

    def slots(self) -> list[SlotInfo]:
        return [SlotInfo(0, "host:1", "/logs/slot-0.log")]

    def history(self) -> list[EpochReport]:
        newest = self.metrics()
        return [] if newest is None else [newest.brief()]

    def query_many(self, operator: str, state: str, keys: Any) -> Any:
        if not self.has_epoch:
            raise EpochError("no epoch of this run yet")
        held = self._checkpoint.model[state]
        newest = self._checkpoint.newest
        assert operator == UID and newest is not None
        values = {key: held[key] for key in keys if key in held}
        return SimpleNamespace(values=values, epoch=newest.number, source="slot")

    def query(self, operator: str, state: str, key: Any) -> Any:
        raise AssertionError("one way to look up is enough")

    def savepoint(self, path: str) -> Any:
        self.asked.append(("savepoint", path))
        return SimpleNamespace(epoch=3, rows=5, bytes=100)

    @property
    def scaling(self) -> ScalingReport:
        decision = Decision(
            kind="up", parallelism=1, target=2, reason="rows wait", wall_ms=5, utilisation=0.9
        )
        return ScalingReport(
            mode="on", decision=decision, changes=[decision], backlog={"rows": 7, "files": None}
        )

    def rebalance(self) -> Balance:
        self.asked.append(("rebalance",))
        return Balance(parallelism=3, busiest_before=2.0, busiest_after=1.1, groups_moved=4)

    def rescale(self, parallelism: int) -> None:
        self.asked.append(("rescale", parallelism))

    def check_stop(self, savepoint: str | None = None) -> None:
        if savepoint is not None:
            check_destination(savepoint)

    def stop(self, savepoint: str | None = None) -> None:
        self.asked.append(("stop", savepoint))
        self.status = "stopped"


def client(site: Site, token: str | None = None, **headers: str) -> TestClient:
    """A client that follows nothing and hides nothing."""
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return TestClient(
        make_app(site), base_url="http://127.0.0.1", headers=headers, follow_redirects=False
    )


def site_of(checkpoint: Checkpoint, run: Any = None, **settings: Any) -> Site:
    return Site(checkpoint.store.url, Serve(**settings), run=run)


def content(folder: Path) -> dict[str, str]:
    """Every file under a folder, by what it holds."""
    return {
        os.path.join(at, name): hashlib.sha256(Path(at, name).read_bytes()).hexdigest()
        for at, _, names in os.walk(folder)
        for name in names
    }
