"""Leadership by ZooKeeper (`zookeeper://h1:2181,h2/path?session=10s`).

`PATH/leader` is an ephemeral node: the member that created it leads. `PATH/waiting/m-…` are
ephemeral sequential nodes, the lowest of which is next in turn. `PATH/next` names the member that
a leader resigned to; the others leave it the lead for one session.

Always true here:
- the lead counts from the begin of the last answer that showed the own node, so a short loss of
  connection keeps it, and it is lost when the session may have expired;
- the user and password are in no message and not in `url`.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec

from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.coordinator.leadership.deadline import Deadline
from cairn.errors import PlanError
from cairn.logs import logger

AUTH_VARIABLE: Final = "CAIRN_ZOOKEEPER_AUTH"
POLLS_PER_SESSION: Final = 6


class ZooKeeperLeadership:
    """The members below one path. The client connects when it is first needed."""

    def __init__(self, url: str, *, session_s: float) -> None:
        try:
            import kazoo.client  # noqa: F401
        except ImportError:
            raise PlanError(
                "the leadership zookeeper:// needs kazoo\n"
                "  next: pip install 'cairn-state[zookeeper]'"
            ) from None
        parts = urlsplit(url)
        user, at, self._hosts = parts.netloc.rpartition("@")
        self._auth = unquote(user) if at else os.environ.get(AUTH_VARIABLE, "")
        self._path = parts.path.rstrip("/")
        if not self._hosts or not self._path:
            raise PlanError(
                "a zookeeper:// leadership needs hosts and a path\n"
                "  expected: zookeeper://h1:2181,h2:2181/path"
            )
        if self._auth and ":" not in self._auth:
            raise PlanError("the credentials for ZooKeeper must be user:password")
        self._session_s = session_s
        self._client: Any = None
        self._lock = threading.Lock()
        self._member: Member | None = None
        self._node: str | None = None
        self._grant: ZooKeeperGrant | None = None
        self._left_since_s: tuple[str, float] | None = None

    @property
    def url(self) -> str:
        return f"zookeeper://{self._hosts}{self._path}?session={self._session_s:g}s"

    def campaign(self, member: Member, stop: threading.Event) -> ZooKeeperGrant | None:
        self._member = member
        changed = threading.Event()
        while not stop.is_set():
            changed.clear()
            try:
                if self._try(member, changed):
                    return self._grant
            except Exception as error:
                logger.warning("standby: ZooKeeper does not answer: %s", type(error).__name__)
            # Short waits, so that `stop` is seen; a watch ends the wait earlier.
            changed.wait(min(self._session_s / POLLS_PER_SESSION, 0.5))
        self._leave()
        return None

    def update(self, member: Member) -> None:
        self._member = member
        try:
            path = f"{self._path}/leader" if self._leads() else self._node
            if path is not None:
                self._connect().set_async(path, _encode(member))
        except Exception as error:
            logger.warning("the member could not be updated: %s", type(error).__name__)

    def leader(self) -> Member | None:
        try:
            return self._read(f"{self._path}/leader")
        except Exception:
            return None

    def waiting(self) -> list[Member]:
        try:
            found = [self._read(path) for path in self._waiting_paths()]
        except Exception:
            return []
        return [member for member in found if member is not None]

    def close(self) -> None:
        if self._grant is not None:
            self._grant.resign()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.stop()
            client.close()

    def _leads(self) -> bool:
        return self._grant is not None and not self._grant.lost.is_set()

    def _connect(self) -> Any:
        from kazoo.client import KazooClient
        from kazoo.security import make_digest_acl

        with self._lock:
            if self._client is None:
                # Never give up, and never wait for long: the session may still be alive.
                retry = {"max_tries": -1, "delay": 0.1, "backoff": 1, "max_delay": 0.5}
                options: dict[str, Any] = {"connection_retry": retry}
                if self._auth:
                    user, _, password = self._auth.partition(":")
                    options["auth_data"] = [("digest", self._auth)]
                    options["default_acl"] = [make_digest_acl(user, password, all=True)]
                client = KazooClient(self._hosts, timeout=self._session_s, **options)
                client.start_async()
                self._client = client
            client = self._client
        if not client.connected:
            raise ConnectionError("not connected")
        return client

    def _ask(self, asked: Any) -> Any:
        return asked.get(timeout=self._session_s)

    def _try(self, member: Member, changed: threading.Event) -> bool:
        """Create the leader's node if this member is next in turn; True if it was created."""
        from kazoo.exceptions import NodeExistsError

        client = self._connect()
        self._wait_in_line(client, member)
        path = f"{self._path}/leader"
        found = self._ask(client.exists_async(path, watch=lambda event: changed.set()))
        if found is not None:
            self._left_since_s = None
            if found.ephemeralOwner == client.client_id[0]:
                # The session outlived a grant that was lost: nobody else could ever lead.
                self._ask(client.delete_async(path))
            return False
        if not self._is_next(client, member):
            return False
        begun_s = time.monotonic()
        try:
            self._ask(client.create_async(path, _encode(member), ephemeral=True))
        except NodeExistsError:
            return False
        self._grant = ZooKeeperGrant(self, client, begun_s)
        self._leave()
        return True

    def _wait_in_line(self, client: Any, member: Member) -> None:
        self._ask(client.ensure_path_async(f"{self._path}/waiting"))
        if self._node is None or self._ask(client.exists_async(self._node)) is None:
            path = f"{self._path}/waiting/m-"
            made = client.create_async(path, _encode(member), ephemeral=True, sequence=True)
            self._node = self._ask(made)

    def _is_next(self, client: Any, member: Member) -> bool:
        members = self.waiting()
        named = self._read_next(client)
        if named == member.identity:
            return True
        if named and any(each.identity == named for each in members):
            if self._left_since_s is None or self._left_since_s[0] != named:
                self._left_since_s = (named, time.monotonic())
            if time.monotonic() - self._left_since_s[1] < self._session_s:
                return False
            members = [each for each in members if each.identity != named]
        return bool(members) and members[0].identity == member.identity

    def _read_next(self, client: Any) -> str:
        from kazoo.exceptions import NoNodeError

        try:
            data: bytes = self._ask(client.get_async(f"{self._path}/next"))[0]
        except NoNodeError:
            return ""
        return data.decode()

    def _waiting_paths(self) -> list[str]:
        folder = f"{self._path}/waiting"
        names = self._ask(self._connect().get_children_async(folder))
        return [f"{folder}/{name}" for name in sorted(names)]

    def _read(self, path: str) -> Member | None:
        from kazoo.exceptions import NoNodeError

        try:
            data, _ = self._ask(self._connect().get_async(path))
        except NoNodeError:
            return None
        return msgspec.json.decode(data, type=Member)

    def _leave(self) -> None:
        node, self._node = self._node, None
        try:
            if node is not None:
                self._ask(self._connect().delete_async(node))
        except Exception:
            pass  # It goes with the session.


class ZooKeeperGrant:
    """The lead, while the own session holds the leader's node."""

    only_if_last: int | None = None

    def __init__(self, group: ZooKeeperLeadership, client: Any, begun_s: float) -> None:
        self._group = group
        self._client = client
        self._session = client.client_id[0]
        self._path = f"{group._path}/leader"
        self._deadline = Deadline(group._session_s, begun_s)
        self._lock = threading.Lock()
        self._deadline.watch()
        threading.Thread(target=self._run, name="cairn-renewals", daemon=True).start()

    @property
    def lost(self) -> threading.Event:
        return self._deadline.lost

    def confirm(self, term: int) -> None:
        """Nothing to write: the node is held already."""

    def resign(self, to: str | None = None) -> None:
        with self._lock:
            if not self._deadline.check():
                return
            self.lost.set()
        group = self._group
        try:
            path = f"{group._path}/next"
            group._ask(self._client.ensure_path_async(path))
            group._ask(self._client.set_async(path, (to or "").encode()))
            if self._is_own():
                group._ask(self._client.delete_async(self._path))
        except Exception as error:
            logger.warning("the lead ends with its session: %s", type(error).__name__)

    def _is_own(self) -> bool:
        stat = self._group._ask(self._client.exists_async(self._path))
        return stat is not None and stat.ephemeralOwner == self._session

    def _run(self) -> None:
        while not self.lost.wait(self._group._session_s / POLLS_PER_SESSION):
            begun_s = time.monotonic()
            try:
                if self._is_own():
                    self._deadline.extend(begun_s)
                else:
                    self.lost.set()
            except Exception as error:
                logger.warning("ZooKeeper does not answer: %s", type(error).__name__)


def _encode(member: Member) -> bytes:
    return msgspec.json.encode(member)
