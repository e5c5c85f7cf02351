"""What a store in HDFS does when requests are lost, sent twice or refused.

The contract suite runs over a real HDFS; here a stand-in for its client fails as it is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cairn.errors import CommitUnknownError, PlanError
from cairn.sinks import Files, list_published
from cairn.sinks.base import Execution, SinkContext
from cairn.storage import hdfs_store
from cairn.storage.store import Retry, Store, is_away, open_store
from tests.hdfs import FakeClient
from tests.places.base import SCHEMA, batch

AWAY = OSError("Connection reset by peer (os error 104)")
REFUSED = RuntimeError('RPCError("org.apache.hadoop.security.AccessControlException", "no")')


@pytest.fixture
def client(tmp_path: Path) -> FakeClient:
    return FakeClient(tmp_path)


@pytest.fixture
def sleeps() -> list[float]:
    return []


@pytest.fixture
def store(client: FakeClient, sleeps: list[float]) -> Iterator[Store]:
    with mock.patch.object(hdfs_store, "open_client", lambda url: client):
        yield open_store("hdfs://namenode:8020/out/", retry=Retry(sleeps.append))


def everything(client: FakeClient) -> list[str]:
    return [found.path for found in client.list_status("/", recursive=True) if not found.isdir]


def before(call: Callable[..., Any], error: BaseException, times: int = 1) -> Callable[..., Any]:
    """Fail instead of the first calls."""
    left = [error] * times

    def fail(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return call(*args, **options)

    return fail


def after(call: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """Fail after each call: its answer is lost."""

    def fail(*args: Any, **options: Any) -> Any:
        call(*args, **options)
        raise error

    return fail


def test_a_put_that_is_cut_off_in_the_middle_shows_nothing(
    store: Store, client: FakeClient, tmp_path: Path
) -> None:
    seen = []

    def parts() -> Iterator[bytes]:
        yield b"half of it"
        seen.append((everything(client), store.list(), store.exists("a/b")))
        raise KeyboardInterrupt

    with (
        mock.patch.object(client, "delete", side_effect=AWAY),
        pytest.raises(KeyboardInterrupt),
    ):
        store._replace("/out/a/b", parts())  # type: ignore[attr-defined]
    ((hidden, listed, exists),) = seen
    assert len(hidden) == 1 and not listed and not exists
    (left,) = store.list_unfinished()
    assert store.list_unfinished() == {left: "a/b"}
    store.delete([left])
    assert everything(client) == []


def test_a_put_if_absent_whose_answer_is_lost_has_an_unknown_outcome(
    store: Store, client: FakeClient
) -> None:
    with (
        mock.patch.object(client, "rename", after(client.rename, AWAY)),
        pytest.raises(CommitUnknownError),
    ):
        store.put_if_absent("epochs/1", b"mine")
    assert store.get("epochs/1") == b"mine"
    assert store.put_if_absent("epochs/1", b"other") is False
    assert everything(client) == ["/out/epochs/1"]


def test_a_put_if_absent_that_did_not_arrive_can_be_done_again(
    store: Store, client: FakeClient
) -> None:
    with (
        mock.patch.object(client, "rename", before(client.rename, AWAY)),
        pytest.raises(CommitUnknownError),
    ):
        store.put_if_absent("epochs/1", b"mine")
    assert everything(client) == []
    assert store.put_if_absent("epochs/1", b"mine") is True


def test_a_rename_that_the_client_sends_twice_is_not_taken_for_a_loss(
    store: Store, client: FakeClient
) -> None:
    def twice(source: str, target: str, overwrite: bool = False) -> None:
        rename(source, target, overwrite)
        rename(source, target, overwrite)

    rename = client.rename
    with (
        mock.patch.object(client, "rename", twice),
        pytest.raises(CommitUnknownError),
    ):
        store.put_if_absent("epochs/1", b"mine")
    assert store.get("epochs/1") == b"mine"

    # Nor by a namenode that looks at the target first.
    with (
        mock.patch.object(client, "rename", after(rename, FileExistsError("it exists"))),
        pytest.raises(CommitUnknownError),
    ):
        store.put_if_absent("epochs/2", b"mine")
    assert store.get("epochs/2") == b"mine"


def test_a_loss_is_unknown_as_long_as_the_hidden_file_cannot_be_looked_for(
    store: Store, client: FakeClient
) -> None:
    store.put("epochs/1", b"first")
    with (
        mock.patch.object(client, "delete", side_effect=AWAY),
        pytest.raises(CommitUnknownError),
    ):
        store.put_if_absent("epochs/1", b"mine")
    assert store.get("epochs/1") == b"first"


def test_a_put_whose_rename_the_client_sends_twice_is_done(
    store: Store, client: FakeClient, sleeps: list[float]
) -> None:
    with mock.patch.object(client, "rename", before(client.rename, FileNotFoundError("gone"))):
        store.put("a", b"1")
    assert store.get("a") == b"1" and len(sleeps) == 1
    assert everything(client) == ["/out/a"]


def test_a_namenode_that_is_away_for_a_while_is_waited_for(
    store: Store, client: FakeClient, sleeps: list[float]
) -> None:
    with mock.patch.object(client, "create", before(client.create, AWAY, times=2)):
        assert store.put_if_absent("a", b"1") is True
    safe = RuntimeError('RPCError("org.apache.hadoop.hdfs.server.namenode.SafeModeException", "")')
    with mock.patch.object(client, "create", before(client.create, safe)):
        store.put("b", b"2")
    assert len(sleeps) == 3
    with (
        mock.patch.object(client, "read", side_effect=AWAY),
        pytest.raises(ConnectionError, match="hdfs://namenode:8020/out: Connection reset") as e,
    ):
        store.get("a")
    assert is_away(e.value)


def test_what_a_namenode_refuses_is_not_tried_again(
    store: Store, client: FakeClient, sleeps: list[float]
) -> None:
    for name, write in (("create", store.put), ("rename", store.put_if_absent)):
        with (
            mock.patch.object(client, name, side_effect=REFUSED),
            pytest.raises(RuntimeError, match="AccessControl"),
        ):
            write("a", b"1")
    assert not sleeps and everything(client) == []


def test_a_folder_that_vanishes_while_it_is_listed_is_listed_again(
    store: Store, client: FakeClient
) -> None:
    store.put("a/b", b"1")
    lost = before(client.list_status, FileNotFoundError("/out/c"))
    with mock.patch.object(client, "list_status", lost):
        assert [found.path for found in store.list()] == ["a/b"]


def test_without_create_a_missing_folder_is_not_found(store: Store) -> None:
    with pytest.raises(KeyError, match="hdfs://namenode:8020/nowhere"):
        open_store("hdfs://namenode:8020/nowhere", create=False)
    store.put("a", b"1")
    assert open_store("hdfs://namenode:8020/out", create=False).exists("a")


def test_a_sink_publishes_there_by_renames(store: Store) -> None:
    sink = Files(store.url, partition_by="k")
    assert not sink.listed
    sink.open(SinkContext("job", "j", "out", SCHEMA))
    writer = sink.writer(2, 0, Execution())
    writer.write(batch((1, "a"), (2, "b")))
    committable = writer.prepare()
    assert committable is not None and list_published(store.url) == []
    sink.commit(2, [committable])
    assert len(list_published(store.url)) == 2
    assert list_published(store.url)[0].startswith("hdfs://namenode:8020/out/k=1/part-")


def test_an_address_that_hdfs_native_refuses_is_an_error_of_the_plan() -> None:
    with pytest.raises(PlanError, match="HADOOP_CONF_DIR"):
        open_store("hdfs://no-name-service/x")


def test_without_hdfs_native_it_says_what_to_install() -> None:
    with (
        mock.patch.dict(sys.modules, {"hdfs_native": None}),
        pytest.raises(PlanError, match=r"cairn-state\[hdfs\]"),
    ):
        open_store("hdfs://namenode:8020/x")
