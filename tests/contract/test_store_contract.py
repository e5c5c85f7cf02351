"""One suite over every store. A new store adds a line to STORES."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cairn.errors import CommitUnknownError
from cairn.storage.conditional_put import check_conditional_put
from cairn.storage.log import Log
from cairn.storage.store import NotFoundError, Retry, Store, open_store
from tests.hdfs import hdfs
from tests.marks import for_soak
from tests.s3 import S3, s3_server

STORES: dict[str, Callable[[Path], str]] = {
    "local": lambda folder: str(folder / "store"),
    "file-url": lambda folder: f"file://{folder}/store with space",
    "memory": lambda folder: "memory:",
    "s3": lambda folder: f"s3://cairn-tests/{uuid.uuid4().hex}/store",
    "hdfs": lambda folder: hdfs().url() + "/a b#%é",
    "hadoop": lambda folder: f"hadoop+viewfs://cairn/jobs/{uuid.uuid4().hex}/a b#%é",
}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server, server.in_environment():
        yield server


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", hdfs().settings)


NEEDED = {"s3": "s3", "hadoop": "mounted"}
"""The fixtures that stores need."""


@pytest.fixture
def sleeps() -> list[float]:
    """How long the store has waited to try again."""
    return []


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in NEEDED:
        request.getfixturevalue(NEEDED[request.param])
    return STORES[request.param](tmp_path)


@pytest.fixture
def store(url: str, sleeps: list[float]) -> Store:
    return open_store(url, retry=Retry(sleep=sleeps.append))


def test_what_was_put_is_read_back(store: Store) -> None:
    store.put("a/b", b"hello")
    assert store.get("a/b") == b"hello"
    assert store.exists("a/b")
    store.put("a/b", b"")
    assert store.get("a/b") == b""


def test_a_range_ends_where_the_object_ends(store: Store, sleeps: list[float]) -> None:
    store.put("a", b"0123456789")
    assert store.get_range("a", 2, 3) == b"234"
    assert store.get_range("a", 8, 30) == b"89"
    assert store.get_range("a", 3, 0) == b""
    assert store.get_range("a", 100, 5) == b""
    assert not sleeps, "a short object was taken for a transient error"


def test_a_missing_object_is_not_found_without_retries(store: Store, sleeps: list[float]) -> None:
    for read in (
        lambda: store.get("x/y"),
        lambda: store.get_range("x/y", 0, 1),
        lambda: store.move("x/y", "x/z"),
    ):
        with pytest.raises(NotFoundError):
            read()
    assert not store.exists("x/y")
    assert not sleeps


def test_put_if_absent_creates_once_and_keeps_the_first_content(store: Store) -> None:
    assert store.put_if_absent("epochs/1", b"first") is True
    assert store.put_if_absent("epochs/1", b"second") is False
    assert store.get("epochs/1") == b"first"


def test_put_file_streams_a_local_file(store: Store, tmp_path: Path) -> None:
    data = bytes(range(256)) * 50_000
    (tmp_path / "source").write_bytes(data)
    store.put_file("big/file", str(tmp_path / "source"))
    assert store.get("big/file") == data


def test_move_can_be_repeated(store: Store) -> None:
    store.put("from/a", b"x")
    store.put("to/b", b"old")
    store.move("from/a", "to/b")
    store.move("from/a", "to/b")
    assert store.get("to/b") == b"x"
    assert not store.exists("from/a")


def test_delete_ignores_missing_objects(store: Store) -> None:
    store.put("a", b"1")
    store.delete(["nope", "a", "no/pe"])
    store.delete([])
    assert not store.exists("a")


def test_delete_removes_many_at_once(store: Store) -> None:
    paths = [f"many/{number}" for number in range(12)]
    for path in paths:
        store.put(path, b"1")
    store.put("kept", b"1")
    store.delete(["many/nope", *paths])
    assert [found.path for found in store.list()] == ["kept"]


def test_delete_folder_removes_what_is_under_it_hidden_names_too(store: Store) -> None:
    for path in ("a/b", "a/.b.crc", "a/deep/.c", "ab/d"):
        store.put(path, b"1")
    store.delete_folder("a")
    store.delete_folder("a/")
    store.delete_folder("nothing")
    for gone in ("a/b", "a/.b.crc", "a/deep/.c"):
        assert not store.exists(gone)
    assert store.exists("ab/d")


def test_list_shows_objects_of_a_folder_only_sorted_with_sizes(store: Store) -> None:
    for path in ("s/b", "s/a/deep", "s2/c", "t"):
        store.put(path, b"12345")
    found = store.list("s")
    assert [(o.path, o.size) for o in found] == [("s/a/deep", 5), ("s/b", 5)]
    assert all(abs(o.modified_s - time.time()) < 60 for o in found)
    assert store.list("s/") == found
    assert store.list("nothing") == []
    assert len(store.list()) == 4


def test_a_store_travels_as_its_url(store: Store) -> None:
    store.put("a", b"1")
    assert open_store(store.url).get("a") == b"1"
    assert pickle.loads(pickle.dumps(store)).get("a") == b"1"


@pytest.mark.parametrize("path", ["", "/a", "a/../b", "a//b", "./a"])
def test_paths_outside_the_store_are_refused(store: Store, path: str) -> None:
    for write in (store.put, store.put_if_absent):
        with pytest.raises(ValueError):
            write(path, b"")


def test_local_path_is_the_file_of_a_local_store_only(store: Store) -> None:
    store.put("a/b", b"1")
    path = store.local_path("a/b")
    if store.url.startswith("file:"):
        assert path is not None and Path(path).read_bytes() == b"1"
    else:
        assert path is None


def _race(url: str, name: int, rounds: int, barrier: object, results: object) -> None:
    store = open_store(url)
    for number in range(rounds):
        barrier.wait()  # type: ignore[attr-defined]
        won = store.put_if_absent(f"epochs/{number}", f"{name}".encode())
        results.put((number, name, won))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["local", "s3", "hdfs", for_soak("hadoop")])
def test_of_racing_processes_exactly_one_wins_each_number(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind in NEEDED:
        request.getfixturevalue(NEEDED[kind])
    racers, rounds = 3, 5 if kind in ("hdfs", "hadoop") else 25
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(racers), context.Queue()
    url = STORES[kind](tmp_path)
    processes = [
        context.Process(target=_race, args=(url, n, rounds, barrier, results))
        for n in range(racers)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in range(racers * rounds)]
    for process in processes:
        process.join(10)
    store = open_store(url)
    for number in range(rounds):
        winners = [name for n, name, won in found if n == number and won]
        assert len(winners) == 1
        assert store.get(f"epochs/{number}") == str(winners[0]).encode()


@pytest.mark.soak
def test_records_that_were_put_survive_a_namenode_that_is_killed_and_comes_back() -> None:
    server = hdfs()
    store = open_store(server.url())
    done: list[int] = []
    unknown: list[int] = []

    def put_all() -> None:
        for number in range(40):
            while True:
                try:
                    if store.put_if_absent(f"epochs/{number}", f"{number}".encode() * 1000):
                        break
                    assert number in unknown, "refused, though nobody else writes"
                    break
                except CommitUnknownError:
                    unknown.append(number)
                except ConnectionError:
                    continue
            done.append(number)

    writer = threading.Thread(target=put_all)
    writer.start()
    for _ in range(2):
        count = len(done)
        while len(done) < count + 8:
            time.sleep(0.05)
        server.namenode.kill()
        time.sleep(1)
        server.namenode.start()
        server.namenode.await_port()
    writer.join()
    assert [found.path for found in store.list()] == sorted(f"epochs/{n}" for n in range(40))
    for number in range(40):
        assert store.get(f"epochs/{number}") == f"{number}".encode() * 1000


def test_another_process_opens_the_store_by_its_url(store: Store) -> None:
    store.put("a/b", b"hello")
    program = (
        "import sys\n"
        "from cairn.storage.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "assert store.get('a/b') == b'hello'\n"
        "assert not store.put_if_absent('a/b', b'mine')\n"
        "store.put('from/there', b'1')\n"
    )
    subprocess.run([sys.executable, "-c", program, store.url], check=True)
    assert store.get("from/there") == b"1"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_without_create_a_missing_local_folder_is_not_made(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        open_store(f"{scheme}{tmp_path}/nowhere", create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_driver_that_starts_sees_that_the_store_keeps_put_if_absent(store: Store) -> None:
    log = Log(store)
    takeover = log.take_over(host="h", pid=1, wall_ms=1)
    check_conditional_put(log, takeover)
    assert Log(store).read(1) == takeover
