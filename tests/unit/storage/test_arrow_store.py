"""A store over pyarrow.fs; Arrow's local file system, made strict, stands in for HDFS."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from cairn.errors import PlanError
from cairn.sinks import Files, list_published
from cairn.sinks.base import Execution, SinkContext
from cairn.storage import arrow_store
from cairn.storage.log import create_or_open_job
from cairn.storage.store import NotFoundError, Store, open_store
from tests.places.base import SCHEMA, batch
from tests.places.files import HdfsLike


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = (HdfsLike(str(tmp_path)), "/out")
    with mock.patch.object(arrow_store, "open_filesystem", lambda url: opened):
        yield open_store("hdfs://namenode:8020/out/")


def test_objects_are_put_read_listed_and_deleted(store: Store, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"from a file" * 1000)
    store.put("a/b c#%é", b"one")
    store.put_file("f.gz", str(local))
    assert store.get("a/b c#%é") == b"one"
    assert store.get("f.gz") == local.read_bytes()
    assert store.get_range("f.gz", 5, 6) == b"a file"
    assert store.get_range("f.gz", 10_999, 10) == b"e" and store.get_range("f.gz", 11_000, 1) == b""
    assert [(found.path, found.size) for found in store.list()] == [
        ("a/b c#%é", 3),
        ("f.gz", 11000),
    ]
    assert [found.path for found in store.list("a/")] == ["a/b c#%é"]
    assert store.list("nothing") == []
    assert store.exists("f.gz") and not store.exists("a") and not store.exists("x")
    store.delete(["f.gz", "f.gz", "x"])
    assert [found.path for found in store.list()] == ["a/b c#%é"]
    store.delete_folder("a")
    assert store.list() == []


def test_what_is_not_there_is_not_found(store: Store) -> None:
    for read in (store.get, lambda path: store.get_range(path, 0, 1)):
        with pytest.raises(NotFoundError):
            read("x")
    with pytest.raises(NotFoundError):
        store.move("x", "y")
    with pytest.raises(ValueError, match="not a path"):
        store.get("../x")


def test_a_move_done_twice_is_done(store: Store) -> None:
    store.put("a", b"1")
    store.move("a", "folder/b")
    store.move("a", "folder/b")
    assert store.get("folder/b") == b"1" and not store.exists("a")


def test_a_file_that_is_there_is_never_deleted_by_a_move_or_a_put(
    store: Store, tmp_path: Path
) -> None:
    """HDFS refuses to rename onto a file; a driver may die before it has renamed again."""
    store.put("a", b"1")
    store.put("b", b"2")
    deleted = []
    delete_file = store._fs.delete_file  # type: ignore[attr-defined]

    def noted(path: str) -> None:
        deleted.append(os.path.basename(path))
        delete_file(path)

    store._fs.delete_file = noted  # type: ignore[attr-defined]
    store.move("a", "b")
    store.put("b", b"3")
    assert "b" not in deleted and store.get("b") == b"2"
    assert os.listdir(tmp_path / "out") == ["b"]


def test_a_write_that_fails_leaves_nothing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        store.put("a/b", object())  # type: ignore[arg-type]
    assert os.listdir(tmp_path / "out" / "a") == []


def test_it_pickles_as_its_url(store: Store) -> None:
    store.put("a", b"1")
    assert pickle.loads(pickle.dumps(store)).get("a") == b"1"
    assert store.url == "hdfs://namenode:8020/out"


def test_a_checkpoint_there_is_refused(store: Store) -> None:
    with pytest.raises(PlanError, match="no checkpoint"):
        create_or_open_job(store, "job", 128)


def test_a_sink_publishes_there_by_renames(store: Store, tmp_path: Path) -> None:
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
    with pytest.raises(PlanError, match="put-if-absent"):
        Files(store.url, listed=True).open(SinkContext("job", "j", "out", SCHEMA))


def test_without_hadoop_it_says_what_is_needed() -> None:
    with pytest.raises(PlanError, match="CLASSPATH"):
        open_store("hdfs://nowhere.invalid:8020/x")
