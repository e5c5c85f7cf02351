"""A store over Hadoop's own client when the server, the JVM or a setting fails.

A real JVM speaks to an imitation of WebHDFS. The contract suite runs over a real HDFS.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from cairn.errors import CommitUnknownError, PlanError
from cairn.query.sql_apart import run_sql_apart
from cairn.sinks.files.published import spark_url
from cairn.snapshots.tables import open_state
from cairn.storage import hadoop_jvm
from cairn.storage.hadoop_jvm import VARIABLE, connect
from cairn.storage.probe import put_probe
from cairn.storage.store import NotFoundError, Retry, Store, is_away, is_hadoop, open_store
from tests.unit.snapshots.checkpoints import Checkpoint, value
from tests.webhdfs import WebHdfs, missing_class

LARGE = bytes(range(256)) * 4000


@pytest.fixture(scope="module", autouse=True)
def classes() -> Iterator[None]:
    with mock.patch.dict(os.environ, {"CLASSPATH": missing_class()}):
        yield


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebHdfs]:
    with WebHdfs(tmp_path / "served") as server:
        server.folder.mkdir()
        yield server


@pytest.fixture
def sleeps() -> list[float]:
    return []


@pytest.fixture
def store(server: WebHdfs, sleeps: list[float]) -> Store:
    return open_store(server.url("jobs/a b#%é"), retry=Retry(sleeps.append))


def files(server: WebHdfs) -> list[str]:
    found = (path for path in server.folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(server.folder)) for path in found)


def jvm_process() -> psutil.Process:
    java = connect().gateway.jvm.java.lang
    return psutil.Process(java.ProcessHandle.current().pid())


def test_small_and_large_objects_are_read_back_whole_and_in_ranges(
    store: Store, server: WebHdfs, tmp_path: Path
) -> None:
    store.put("small", b"hello")
    store.put_parts("parts", [b"ab", b"", LARGE, b"c"])
    (tmp_path / "local").write_bytes(LARGE * 5)
    store.put_file("large", str(tmp_path / "local"))
    store.put("empty", b"")
    assert store.get("small") == b"hello" and store.get("empty") == b""
    assert store.get("parts") == b"ab" + LARGE + b"c"
    assert store.get("large") == LARGE * 5
    assert store.get_range("large", 1000, 200_000) == (LARGE * 5)[1000:201_000]
    assert store.get_range("large", len(LARGE) * 5 - 3, 10) == LARGE[-3:]
    names = ("empty", "large", "parts", "small")
    assert files(server) == [f"jobs/a b#%é/{name}" for name in names]


def test_a_put_if_absent_whose_answer_is_lost_has_an_unknown_outcome(
    store: Store, server: WebHdfs
) -> None:
    server.drop_after["RENAME"] = 2  # The JVM may send it again.
    with pytest.raises(CommitUnknownError):
        store.put_if_absent("epochs/1", b"mine")
    server.drop_after.clear()
    assert store.get("epochs/1") == b"mine"
    assert store.put_if_absent("epochs/1", b"other") is False
    assert store.get("epochs/1") == b"mine"


def test_a_server_that_is_away_for_a_while_is_waited_for(
    store: Store, server: WebHdfs, sleeps: list[float]
) -> None:
    server.drop_before["CREATE"] = 4
    assert store.put_if_absent("a", b"1") is True
    assert sleeps
    server.drop_before["GETFILESTATUS"] = 1000
    with pytest.raises(ConnectionError, match="webhdfs://") as error:
        store.get("a")
    assert is_away(error.value)


def test_a_write_that_is_refused_is_not_tried_again(
    store: Store, server: WebHdfs, sleeps: list[float]
) -> None:
    with (
        mock.patch.object(server, "create", side_effect=PermissionError("no")),
        pytest.raises(PermissionError, match="AccessControlException"),
    ):
        store.put("a", b"1")
    assert not sleeps


def test_a_file_system_that_looks_first_and_renames_later_is_refused_at_the_start(
    store: Store, server: WebHdfs
) -> None:
    with put_probe(store, "some-id") as probe:
        assert store.get(probe) == b"some-id"
    server.is_racy = True
    with (
        pytest.raises(PlanError, match="does not keep put-if-absent"),
        put_probe(store, "other-id"),
    ):
        pass
    assert files(server) == []


def test_a_file_system_without_a_rename_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"LocalFileSystem does not rename in one step[\s\S]*next:"):
        open_store(f"hadoop+file://{tmp_path}/store")
    assert not (tmp_path / "store").exists()


def test_what_hadoops_client_cannot_open_is_an_error_of_the_plan() -> None:
    with pytest.raises(PlanError, match=r'No FileSystem for scheme "nofs"[\s\S]*CLASSPATH'):
        open_store("hadoop+nofs://x/y")
    with pytest.raises(PlanError, match=r"UnknownHost[\s\S]*HADOOP_CONF_DIR"):
        open_store("hadoop+hdfs://no-such-name-service/y")
    with pytest.raises(PlanError, match=r"Empty Mount table[\s\S]*HADOOP_CONF_DIR"):
        open_store("hadoop+viewfs://no-such-cluster/y")


def test_without_create_a_missing_folder_is_not_found(server: WebHdfs) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        open_store(server.url("nowhere"), create=False)
    assert files(server) == []


def test_only_urls_for_hadoops_client_are_left_to_it() -> None:
    assert is_hadoop("webhdfs://h:1/x") and is_hadoop("hadoop+hdfs://h/x")
    assert not any(map(is_hadoop, ("hdfs://h/x", "s3://b/x", "/a/b", "viewfs://c/x", "memory:")))
    with pytest.raises(ValueError, match=r"unknown scheme 'ofs'[\s\S]*hadoop\+ofs://"):
        open_store("ofs://x/y")


def test_spark_is_given_the_url_without_the_prefix() -> None:
    store = SimpleNamespace(url="hadoop+viewfs://cairn/out/a b")
    assert spark_url(store) == "viewfs://cairn/out/a%20b"  # type: ignore[arg-type]


def test_a_jvm_that_is_killed_is_replaced(store: Store, sleeps: list[float]) -> None:
    store.put("a", b"1")
    before = jvm_process()
    before.kill()
    psutil.wait_procs([before], timeout=10)
    assert store.get("a") == b"1"
    assert jvm_process().pid != before.pid


def test_processes_share_a_jvm_which_ends_with_the_last_of_them(store: Store) -> None:
    store.put("a", b"1")
    program = (
        "import sys, time\n"
        "from cairn.storage.hadoop_jvm import connect\n"
        "from cairn.storage.store import open_store\n"
        "assert open_store(sys.argv[1]).get('a') == b'1'\n"
        "print(connect().gateway.jvm.java.lang.ProcessHandle.current().pid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    other = os.environ | {"HADOOP_USER_NAME": "another"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, store.url],
            stdout=subprocess.PIPE,
            text=True,
            env=other,
        )
        for _ in range(2)
    ]
    try:
        pids = [int(child.stdout.readline()) for child in children if child.stdout]
        assert pids[0] == pids[1]
        assert pids[0] != jvm_process().pid, "another user of Hadoop has a JVM of its own"
        jvm = psutil.Process(pids[0])
        children[0].send_signal(signal.SIGKILL)
        children[0].wait()
        time.sleep(0.3)
        assert jvm.is_running()
        children[1].send_signal(signal.SIGKILL)
        children[1].wait()
        psutil.wait_procs([jvm], timeout=10)
        assert not jvm.is_running() or jvm.status() == psutil.STATUS_ZOMBIE
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
    assert store.get("a") == b"1"


def test_a_forked_child_does_not_use_the_connections_of_its_parent(store: Store) -> None:
    store.put("a", b"1")
    done = False
    child = os.fork()
    if child == 0:
        try:
            done = open_store(store.url).get("a") == b"1"
        finally:
            os._exit(0 if done else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("a") == b"1"


def test_settings_reach_the_jvm_and_nobody_else_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "correct-horse"
    given = {"spark.hadoop.fs.some.key": secret, "spark.jars": ""}
    monkeypatch.setenv(VARIABLE, json.dumps(given))
    jvm = connect()
    assert jvm._settings.get("fs.some.key") == secret
    process = jvm_process()
    assert secret not in " ".join(process.cmdline())
    class_path = os.pathsep.join(hadoop_jvm._class_path(given))
    folder = hadoop_jvm._home(hadoop_jvm._look_around(), class_path)
    assert {path.name for path in folder.iterdir()} == {"alive", "address", "lock", "jvm.log"}
    for path in (folder / "address", folder / "lock", folder / "jvm.log"):
        assert secret not in path.read_text()
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.soak
def test_sql_in_a_process_of_its_own_uses_the_jvm_that_is_there(
    server: WebHdfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"spark.hadoop.some": "setting"}))
    made = Checkpoint({"n": value("bigint")}, store=open_store(server.url("jobs/asked")))
    made.commit({"n": {1: 10, 2: 20}})
    with open_state(made.store, hold_ms=0) as source:
        found = run_sql_apart(source, "select sum(value) from n", rows_max=5, timeout_s=60)
    assert [list(row.values()) for row in found.to_pylist()] == [[30]]


def test_a_driver_passes_its_settings_on_to_the_workers_of_its_session() -> None:
    conf = {"spark.hadoop.a.b": "1", "spark.jars": "/x.jar", "spark.app.name": "n"}
    context = SimpleNamespace(
        environment={}, getConf=lambda: SimpleNamespace(getAll=lambda: list(conf.items()))
    )
    contexts = SimpleNamespace(_active_spark_context=context)
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(hadoop_jvm, "_seen", None),
        mock.patch.dict(sys.modules, {"pyspark": SimpleNamespace(SparkContext=contexts)}),
    ):
        settings = hadoop_jvm._find_settings()
        assert json.loads(settings) == {"spark.hadoop.a.b": "1", "spark.jars": "/x.jar"}
        assert context.environment == {VARIABLE: settings}
        contexts._active_spark_context = None
        assert hadoop_jvm._find_settings() == settings, "the session has ended"


def test_a_jar_of_the_session_is_found_where_the_executor_has_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "connector.jar").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLASSPATH", "/first/*")
    monkeypatch.setenv("HADOOP_CONF_DIR", "/conf")
    given = {"spark.jars": "file:///of/the/driver/connector.jar,/not/here.jar"}
    found = list(hadoop_jvm._class_path(given))
    assert found[:3] == ["/conf", "/first/*", str(tmp_path / "connector.jar")]
    assert len(found) == 4 and found[3].endswith("/jars/*")


def test_without_classes_of_hadoop_it_says_where_it_has_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (py4j,) = (
        Path(found[:-1]).glob("py4j*.jar") for found in list(hadoop_jvm._class_path({}))[-1:]
    )
    monkeypatch.setenv("HADOOP_USER_NAME", "of-this-test")  # It has no JVM yet.
    monkeypatch.setattr(hadoop_jvm, "_class_path", lambda given: [str(next(py4j))])
    with pytest.raises(PlanError, match=r"no classes of Hadoop[\s\S]*py4j[\s\S]*next:"):
        connect()


def test_a_java_that_does_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'version \"17\"'\necho 'no memory' >&2\nexit 1\n")
    java.chmod(0o700)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("HADOOP_USER_NAME", "of-this-test")  # It has no JVM yet.
    with pytest.raises(PlanError, match=r"does not start[\s\S]*no memory[\s\S]*next:"):
        connect()
