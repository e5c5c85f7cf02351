"""Leadership by ZooKeeper (`zookeeper://h1:2181,h2/path?session=10s`).

`PATH/leader` is an ephemeral node: the member that created it leads. `PATH/waiting/IDENTITY-…` are
ephemeral sequential nodes, the lowest of which is next in turn. `PATH/next` names the member that
a leader resigned to; the others leave it the lead for one session.

Always true here:
- the lead counts from the begin of the last answer that showed the own node, so a short loss of
  connection keeps it, and it is lost when the session may have expired;
- a grant that is lost releases its node as soon as ZooKeeper answers: a session that lives on must
  not keep the lead from the others;
- a node whose creation was not acknowledged is found again, by its name or its session;
- the user and password are in no message and not in `url`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import msgspec

from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.coordinator.leadership.deadline import Deadline
from cairn.driver.coordinator.leadership.outage import Outage
from cairn.errors import PlanError
from cairn.logs import logger

AUTH_VARIABLE: Final = "CAIRN_ZOOKEEPER_AUTH"
POLLS_PER_SESSION: Final = 6
CONNECT_S: Final = 2.0
"""The first request waits up to this long for a connection."""
CONNECTS_PER_SESSION: Final = 4
"""A server that does not answer costs at most this part of the session, then the next is tried."""
RETRY: Final = {"max_tries": -1, "delay": 0.1, "backoff": 1, "max_jitter": 0, "max_delay": 0.5}
"""Never give up, and never wait for long: the session may still be alive. No jitter: kazoo makes
each pause from the one before, so pauses with jitter and without growth shrink to nothing."""
_SEQUENCE_DIGITS: Final = 10


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
        self.path = parts.path.rstrip("/")
        if not self._hosts or not self.path:
            raise PlanError(
                "a zookeeper:// leadership needs hosts and a path\n"
                "  expected: zookeeper://h1:2181,h2:2181/path"
            )
        if self._auth and not all(self._auth.partition(":")):
            raise PlanError(
                "the credentials for ZooKeeper must be user:password\n"
                f"  next: correct the URL, or the variable {AUTH_VARIABLE}"
            )
        self.session_s = session_s
        self._client: Any = None
        self._is_closed = False
        self._lock = threading.Lock()
        self.member: Member | None = None
        self._node: str | None = None
        self._is_in_line = False
        self._shown: Member | None = None
        """The member as its node in the line shows it."""
        self._grant: ZooKeeperGrant | None = None
        self._left_since_s: tuple[str, float] | None = None
        # One event for all watches: kazoo keeps each function it is given until the node changes.
        self._changed = threading.Event()
        self._outage = Outage("standby: ZooKeeper cannot be used")

    @property
    def url(self) -> str:
        return f"zookeeper://{self._hosts}{self.path}?session={self.session_s:g}s"

    def campaign(self, member: Member, stop: threading.Event) -> ZooKeeperGrant | None:
        self.member = member
        if self._grant is not None:
            self._grant.retire()
        while not stop.is_set():
            self._changed.clear()
            try:
                grant = self._try(self._connect())
                self._outage.end()
                if grant is not None:
                    return grant
            except Exception as error:
                self._outage.note(error)
            # Short waits, so that `stop` is seen; a watch ends the wait earlier.
            self._changed.wait(min(self.session_s / POLLS_PER_SESSION, 0.5))
        with suppress(Exception):  # It goes with the session.
            client = self._connect()
            self.leave_line(client)
            self._remove_own_leader(client)
        return None

    def update(self, member: Member) -> None:
        # The thread that campaigns, or renews, writes it: it knows the node.
        self.member = member
        self._changed.set()

    def leader(self) -> Member | None:
        try:
            return self._read(self._connect(), f"{self.path}/leader")
        except Exception:
            return None

    def waiting(self) -> list[Member]:
        try:
            return self._waiting(self._connect())
        except Exception:
            return []

    def look(self) -> tuple[Member | None, list[Member]]:
        """Return who leads and who waits; errors of the service are raised."""
        from kazoo.exceptions import NoNodeError

        client = self._connect()
        try:
            return self._read(client, f"{self.path}/leader"), self._waiting(client)
        except NoNodeError:
            return None, []  # No driver of this group was ever started.

    def close(self) -> None:
        if self._grant is not None:
            self._grant.resign()
            self._grant.retire()
        with self._lock:
            client, self._client, self._is_closed = self._client, None, True
        if client is not None:
            with suppress(Exception):  # Without a connection the session ends by itself.
                client.stop()
                client.close()

    def ask(self, asked: Any) -> Any:
        """Return the answer to a request, or raise after one session."""
        return asked.get(timeout=self.session_s)

    def _connect(self) -> Any:
        from kazoo.client import KazooClient
        from kazoo.security import make_digest_acl

        with self._lock:
            if self._is_closed:
                raise ConnectionError("closed")
            if self._client is None:
                options: dict[str, Any] = {"connection_retry": RETRY, "logger": _quiet_logger()}
                if self._auth:
                    user, _, password = self._auth.partition(":")
                    options["auth_data"] = [("digest", self._auth)]
                    options["default_acl"] = [make_digest_acl(user, password, all=True)]
                client = KazooClient(
                    self._repeat_hosts(),
                    timeout=self.session_s,
                    handler=_quick_handler(self.session_s / CONNECTS_PER_SESSION),
                    **options,
                )
                client.start_async().wait(CONNECT_S)
                self._client = client
            client = self._client
        if not client.connected:
            raise ConnectionError("not connected")
        return client

    def _repeat_hosts(self) -> str:
        # For the answer to a connection, kazoo waits one session divided by the number of hosts.
        count = len(self._hosts.split(","))
        return ",".join([self._hosts] * math.ceil(CONNECTS_PER_SESSION / count))

    def _try(self, client: Any) -> ZooKeeperGrant | None:
        """Create the leader's node if this member is next in turn; None if it is not."""
        from kazoo.exceptions import NodeExistsError

        assert self.member is not None, "campaign sets the member"
        self._stand_in_line(client)
        self._remove_own_leader(client)
        path = f"{self.path}/leader"
        if self.ask(client.exists_async(path, watch=self._on_change)) is not None:
            self._left_since_s = None
            return None
        named = self._read_next(client)
        if not self._is_next(client, named):
            return None
        begun_s = time.monotonic()
        member = self.member
        try:
            made = client.create_async(path, _encode(member), ephemeral=True, include_data=True)
            created = self.ask(made)[1].czxid
        except NodeExistsError:
            return None
        self._grant = ZooKeeperGrant(self, client, member, created, begun_s)
        with suppress(Exception):  # The grant leaves the line too; a name that stays is harmless.
            self.leave_line(client)
            if named:
                self.ask(client.set_async(f"{self.path}/next", b""))
        return self._grant

    def _on_change(self, event: Any) -> None:
        self._changed.set()

    def _stand_in_line(self, client: Any) -> None:
        assert self.member is not None, "campaign sets the member"
        member = self.member
        if self._node is not None and self.ask(client.exists_async(self._node)) is not None:
            if member != self._shown:
                self.ask(client.set_async(self._node, _encode(member)))
                self._shown = member
            return
        self._make_folders(client)
        self._is_in_line = True
        for name in self._own_names(client):
            stat = self.ask(client.exists_async(f"{self.path}/waiting/{name}"))
            if stat is not None and stat.ephemeralOwner == client.client_id[0]:
                self._node, self._shown = f"{self.path}/waiting/{name}", None
                return
        path = f"{self.path}/waiting/{quote(member.identity, safe='')}-"
        made = client.create_async(path, _encode(member), ephemeral=True, sequence=True)
        self._node, self._shown = self.ask(made), member

    def _make_folders(self, client: Any) -> None:
        from kazoo.security import make_acl

        above = self.path.rpartition("/")[0]
        if self._auth and above:
            # Jobs with other credentials may have their folders beside this one.
            shared = make_acl("world", "anyone", read=True, create=True)
            self.ask(client.ensure_path_async(above, [shared, *client.default_acl]))
        self.ask(client.ensure_path_async(f"{self.path}/waiting"))

    def leave_line(self, client: Any) -> None:
        """Remove the own nodes from the line, where a member that does not campaign blocks it."""
        if not self._is_in_line:
            return
        self._node = None
        for name in self._own_names(client):
            self.ask(client.delete_async(f"{self.path}/waiting/{name}"))
        self._is_in_line = False

    def _remove_own_leader(self, client: Any) -> None:
        """Remove the node of an earlier grant, or of a creation that was not acknowledged."""
        stat = self.ask(client.exists_async(f"{self.path}/leader"))
        if stat is not None and stat.ephemeralOwner == client.client_id[0]:
            self.ask(client.delete_async(f"{self.path}/leader"))

    def _is_next(self, client: Any, named: str) -> bool:
        """Decide by the names of the nodes alone: damaged data must not keep the job down."""
        assert self.member is not None, "campaign sets the member"
        line = [_identity(name) for name in self._line(client)]
        if named == self.member.identity:
            return True
        if named in line:
            if self._left_since_s is None or self._left_since_s[0] != named:
                self._left_since_s = (named, time.monotonic())
            if time.monotonic() - self._left_since_s[1] < self.session_s:
                return False
            line = [each for each in line if each != named]
        return bool(line) and line[0] == self.member.identity

    def _read_next(self, client: Any) -> str:
        from kazoo.exceptions import NoNodeError

        try:
            data: bytes = self.ask(client.get_async(f"{self.path}/next"))[0]
        except NoNodeError:
            return ""
        return data.decode()

    def _line(self, client: Any) -> list[str]:
        """Return the names of the nodes that wait, the next in turn first."""
        names = self.ask(client.get_children_async(f"{self.path}/waiting"))
        return sorted(names, key=lambda name: name[-_SEQUENCE_DIGITS:])

    def _waiting(self, client: Any) -> list[Member]:
        paths = [f"{self.path}/waiting/{name}" for name in self._line(client)]
        found = [self._read(client, path) for path in paths]
        return [member for member in found if member is not None]

    def _own_names(self, client: Any) -> list[str]:
        assert self.member is not None, "campaign sets the member"
        own = self.member.identity
        return [name for name in self._line(client) if _identity(name) == own]

    def _read(self, client: Any, path: str) -> Member | None:
        from kazoo.exceptions import NoNodeError

        try:
            data, _ = self.ask(client.get_async(path))
            return msgspec.json.decode(data, type=Member)
        except (NoNodeError, msgspec.MsgspecError):
            return None


class ZooKeeperGrant:
    """The lead, while the node that this grant created exists."""

    only_if_last: int | None = None

    def __init__(
        self,
        group: ZooKeeperLeadership,
        client: Any,
        shown: Member,
        created: int,
        begun_s: float,
    ) -> None:
        """`created` is the transaction that created the node, which no other node has."""
        self._shown = shown
        self._group = group
        self._client = client
        self._created = created
        self._path = f"{group.path}/leader"
        self._deadline = Deadline()
        self._deadline.begin(group.session_s, begun_s)
        self._is_released = False
        self._lock = threading.Lock()
        self._outage = Outage("leader: ZooKeeper cannot be used")
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
            try:
                path = f"{self._group.path}/next"
                self._check_connected()
                self._group.ask(self._client.ensure_path_async(path))
                self._group.ask(self._client.set_async(path, (to or "").encode()))
            except Exception as error:
                logger.warning("the next leader could not be named: %s", type(error).__name__)
            self.lost.set()
        self._try_to_release()

    def retire(self) -> None:
        """Leave the node as it is from here on: its member campaigns again."""
        with self._lock:
            self.lost.set()
            self._is_released = True

    def _check_connected(self) -> None:
        # A request without a connection waits for one, and who resigns must not.
        if not self._client.connected:
            raise ConnectionError("not connected")

    def _is_own(self) -> bool:
        self._check_connected()
        # A follower may be behind: its answer after a sync is not older than the question.
        self._group.ask(self._client.sync_async(self._path))
        stat = self._group.ask(self._client.exists_async(self._path))
        return stat is not None and stat.czxid == self._created

    def _show(self) -> None:
        """Write what the others see of this member, if it has changed, and leave the line."""
        self._group.leave_line(self._client)
        member = self._group.member
        if member is not None and member != self._shown:
            self._group.ask(self._client.set_async(self._path, _encode(member)))
            self._shown = member

    def _try_to_release(self) -> None:
        """Remove the node, unless it is gone or another's."""
        with self._lock:
            if self._is_released:
                return
            try:
                if self._is_own():
                    self._group.ask(self._client.delete_async(self._path))
                self._group.leave_line(self._client)
                self._is_released = True
            except Exception as error:
                self._outage.note(error)

    def _run(self) -> None:
        pause_s = self._group.session_s / POLLS_PER_SESSION
        while not self.lost.wait(pause_s):
            begun_s = time.monotonic()
            try:
                if self._is_own():
                    self._deadline.extend(begun_s)
                    self._show()
                else:
                    self.lost.set()
                self._outage.end()
            except Exception as error:
                self._outage.note(error)
        self._try_to_release()
        while not self._is_released:
            time.sleep(pause_s)
            self._try_to_release()


def _encode(member: Member) -> bytes:
    return msgspec.json.encode(member)


def _identity(name: str) -> str:
    """Return the identity of the member whose node this is."""
    return unquote(name[: -_SEQUENCE_DIGITS - 1])


def _quick_handler(connect_s: float) -> Any:
    """Return a handler of kazoo that waits this long for a connection, not a whole session."""
    from kazoo.handlers.threading import SequentialThreadingHandler

    class QuickHandler(SequentialThreadingHandler):  # type: ignore[misc]
        def create_connection(self, *args: Any, **options: Any) -> Any:
            return super().create_connection(*args, **{**options, "timeout": connect_s})

    return QuickHandler()


def _quiet_logger() -> logging.Logger:
    """Return a logger that never shows requests: kazoo's debug output has the password in it."""
    found = logging.getLogger("cairn.zookeeper")
    found.setLevel(logging.WARNING)
    return found
