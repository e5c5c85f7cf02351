"""Three leaderships for one suite: each member reaches its service on a way that can fail."""

from __future__ import annotations

import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from cairn.driver.coordinator.leadership import Grant, Leadership, Member, open_leadership
from cairn.errors import CommitConflictError, CommitUnknownError
from cairn.storage.log import Log
from cairn.storage.store import Store, open_store
from cairn.testing.faulty_store import FaultyStore
from tests.kubernetes_api import KubernetesApi
from tests.led_log import append_epoch
from tests.proxy import Proxy
from tests.zookeeper import ZooKeeper

T = TypeVar("T")


class Link(ABC):
    """One member's way to the service."""

    group: Leadership

    @abstractmethod
    def cut(self) -> None: ...

    @abstractmethod
    def mend(self) -> None: ...

    @abstractmethod
    def slow_down(self, delay_s: float) -> None: ...

    def close(self) -> None:
        self.group.close()


class Place(ABC):
    """A service of one kind, with one group and its checkpoint."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.store = open_store(str(folder / "checkpoint"))
        self.links: list[Link] = []
        self.name = uuid.uuid4().hex[:12]

    @abstractmethod
    def link(self, lease_s: float) -> Link:
        """Return a new member's way, with its leadership."""

    @abstractmethod
    def url(self, lease_s: float) -> str:
        """Return the address for another process, which KUBECONFIG completes."""

    def open(self, lease_s: float = 1) -> Link:
        self.links.append(self.link(lease_s))
        return self.links[-1]

    def mend(self) -> None:
        for link in self.links:
            link.mend()

    def close(self) -> None:
        self.mend()
        for link in self.links:
            link.close()


class WayStore(FaultyStore):
    """The store as one member reaches it."""

    delay_s = 0.0

    def _run(self, operation: str, call: Callable[[], T]) -> T:
        time.sleep(self.delay_s)
        return super()._run(operation, call)


class StoreLink(Link):
    def __init__(self, store: Store, lease_s: float) -> None:
        self.way = WayStore(store, seed=1, fault_rate=1)
        self.way.enabled = False
        self.group = open_leadership(f"store:?lease={lease_s}s", store=self.way)

    def cut(self) -> None:
        self.way.enabled = True

    def mend(self) -> None:
        self.way.enabled, self.way.delay_s = False, 0

    def slow_down(self, delay_s: float) -> None:
        self.way.delay_s = delay_s


class InStore(Place):
    def link(self, lease_s: float) -> Link:
        return StoreLink(self.store, lease_s)

    def url(self, lease_s: float) -> str:
        return f"store:?lease={lease_s}s"


class ProxyLink(Link):
    def __init__(self, port: int, open_group: Callable[[int], Leadership]) -> None:
        self.proxy = Proxy(port)
        self.group = open_group(self.proxy.port)

    def cut(self) -> None:
        self.proxy.cut()

    def mend(self) -> None:
        self.proxy.delay_s = 0
        self.proxy.mend()

    def slow_down(self, delay_s: float) -> None:
        self.proxy.delay_s = delay_s

    def close(self) -> None:
        super().close()
        self.proxy.close()


class InZooKeeper(Place):
    def __init__(self, folder: Path, server: ZooKeeper) -> None:
        super().__init__(folder)
        self.server = server

    def link(self, lease_s: float) -> Link:
        def open_group(port: int) -> Leadership:
            return open_leadership(self._url(port, lease_s), store=self.store)

        return ProxyLink(self.server.port, open_group)

    def url(self, lease_s: float) -> str:
        return self._url(self.server.port, lease_s)

    def _url(self, port: int, lease_s: float) -> str:
        return f"zookeeper://me:secret@127.0.0.1:{port}/cairn/{self.name}?session={lease_s}s"


class InKubernetes(Place):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.api = KubernetesApi()
        os.environ["KUBECONFIG"] = str(self.api.write_kubeconfig(folder / "kubeconfig"))

    def link(self, lease_s: float) -> Link:
        def open_group(port: int) -> Leadership:
            before = os.environ["KUBECONFIG"]
            os.environ["KUBECONFIG"] = str(
                self.api.write_kubeconfig(self.folder / f"kubeconfig-{port}", port=port)
            )
            try:
                return open_leadership(self.url(lease_s), store=self.store)
            finally:
                os.environ["KUBECONFIG"] = before

        return ProxyLink(self.api.port, open_group)

    def url(self, lease_s: float) -> str:
        return f"kubernetes:lease/job-{self.name}?lease={lease_s}s"

    def close(self) -> None:
        super().close()
        self.api.close()
        del os.environ["KUBECONFIG"]


class Driver(threading.Thread):
    """Campaigns, takes over and publishes epochs while it leads; again if `repeats`."""

    started: ClassVar[list[Driver]] = []

    @classmethod
    def end_all(cls) -> None:
        """End those of a test: a thread that campaigns on would slow down all later tests."""
        for driver in cls.started:
            driver.stop.set()
        for driver in cls.started:
            driver.join(30)
        cls.started.clear()

    def __init__(
        self, group: Leadership, identity: str, store: Store, *, repeats: bool = False, **facts: Any
    ) -> None:
        super().__init__(daemon=True)
        self.group, self.identity, self.store = group, identity, store
        self.member = Member(identity=identity, host="h", pid=1, **facts)
        self.stop, self.leads = threading.Event(), threading.Event()
        self.grant: Grant | None = None
        self.log = Log(store)
        self.term = 0
        self.published = 0
        self._repeats = repeats
        self.started.append(self)
        self.start()

    def run(self) -> None:
        while not self.stop.is_set():
            grant = self.group.campaign(self.member, self.stop)
            if grant is None:
                return
            try:
                self._lead(grant)
            except (CommitConflictError, CommitUnknownError):
                grant.resign()
            self.leads.clear()
            if not self._repeats and self.term:
                return

    def _lead(self, grant: Grant) -> None:
        self.log = Log(self.store)
        term = self.log.take_over(
            host="h", pid=1, wall_ms=1, only_if_last=grant.only_if_last,
            is_held=lambda: not grant.lost.is_set(),
        ).term  # fmt: skip
        grant.confirm(term)
        self.grant, self.term = grant, term
        self.leads.set()
        while not grant.lost.wait(0.05) and not self.stop.is_set():
            append_epoch(self.log, term)
            self.published += 1
        if self._repeats and self.stop.is_set():
            grant.resign()


def everywhere(places: list[Place], story: Callable[[Place], None]) -> None:
    """Run a story over all places at the same time: most of it is waiting."""
    with ThreadPoolExecutor(len(places)) as pool:
        told = [(place, pool.submit(story, place)) for place in places]
    for place, each in told:
        error = each.exception()
        if error is not None:
            error.add_note(f"leadership: {type(place).__name__}")
            raise error


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)
