"""The local store's durability steps, and which errors are tried again."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from obstore import exceptions as obstore_errors
from obstore.store import MemoryStore

from cairn.errors import CommitUnknownError
from cairn.storage.store import LocalStore, NotFoundError, ObjectStore, Retry, open_store


class Sleeps(list[float]):
    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def failing(times: int, error: BaseException) -> Any:
    left = [times]

    def operation() -> str:
        if left[0] > 0:
            left[0] -= 1
            raise error
        return "done"

    return operation


def test_transient_errors_are_retried_with_growing_pauses() -> None:
    sleeps = Sleeps()
    assert Retry(sleep=sleeps)(failing(4, OSError(errno.EIO, "io"))) == "done"
    limits_s = [0.1, 0.2, 0.4, 0.8]
    assert all(s / 2 <= slept <= s for s, slept in zip(limits_s, sleeps, strict=True))


def test_after_the_last_attempt_the_original_error_comes_out() -> None:
    error = obstore_errors.GenericError("503")
    with pytest.raises(obstore_errors.GenericError) as caught:
        Retry(sleep=Sleeps())(failing(99, error))
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EACCES, "no"),
        FileNotFoundError(2, "x"),
        NotFoundError("x"),
        obstore_errors.PermissionDeniedError("no"),
        ValueError("bug"),
    ],
)
def test_errors_that_will_not_go_away_are_not_retried(error: Exception) -> None:
    sleeps = Sleeps()
    with pytest.raises(type(error)):
        Retry(sleep=sleeps)(failing(1, error))
    assert sleeps == []


def test_put_if_absent_of_unknown_outcome_is_tried_once_only() -> None:
    class Lossy:
        calls = 0

        def put(self, *args: Any, **options: Any) -> None:
            self.calls += 1
            raise obstore_errors.GenericError("connection reset")

    inner = Lossy()
    sleeps = Sleeps()
    with pytest.raises(CommitUnknownError, match="connection reset"):
        ObjectStore("s3://b", inner, Retry(sleep=sleeps)).put_if_absent("a", b"")
    assert (inner.calls, sleeps) == (1, [])


def test_hidden_and_temporary_names_are_never_listed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b", b"1")
    (tmp_path / "a" / ".b.crc").write_bytes(b"")
    (tmp_path / "a" / ".c.0123#0").write_bytes(b"")
    assert [o.path for o in store.list()] == ["a/b"]


def test_writes_leave_no_temporary_files(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b", b"1")
    store.put_if_absent("a/b", b"1")
    store.put_if_absent("a/c", b"1")
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "c"]


@pytest.mark.parametrize("operation", ["put", "put_if_absent"])
def test_full_disk_leaves_nothing_behind_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    store = LocalStore(str(tmp_path), Retry(sleep=Sleeps()))
    store.put("a/x", b"1")

    def full(file: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError) as caught:
        getattr(store, operation)("a/y", b"1")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "a") == ["x"]


def test_file_and_folder_are_fsynced_before_a_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    store.put("a/x", b"1")
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    assert store.put_if_absent("a/y", b"1")
    assert len(synced) == 2
    assert "/.y." in synced[0] and synced[1] == str(tmp_path / "a")


def test_failed_fsync_of_the_folder_leaves_the_outcome_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    store.put("a/x", b"1")
    real = os.fsync
    calls = [0]

    def fsync(file: int) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.EIO, "io")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CommitUnknownError):
        store.put_if_absent("a/y", b"1")


def test_bare_memory_url_is_a_new_store_each_time() -> None:
    one, two = open_store("memory:"), open_store("memory:")
    one.put("a", b"1")
    assert not two.exists("a")
    assert open_store(one.url).exists("a")


def test_a_named_memory_store_is_the_same_within_a_process() -> None:
    open_store("memory:shop").put("a", b"1")
    assert open_store("memory:shop").get("a") == b"1"
    assert open_store("memory://shop").url == open_store("memory:shop").url
    assert not open_store("memory:other").exists("a")
    for wrong in ("memory:../x", "memory:a/b", "memory:.hidden"):
        with pytest.raises(ValueError, match="memory:name"):
            open_store(wrong)


MEMORY_PROGRAM = """
import os, signal, sys
from cairn.storage.store import open_store
store = open_store("memory:shop")
store.put("a", b"1")
print(os.path.dirname(store.root), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "forked":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    assert store.get("a") == b"1"
if sys.argv[1] == "waits":
    sys.stdin.read()
"""


def memory_root(how: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, how], stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0)
    return done.stdout.strip()


def test_a_memory_store_goes_with_its_process_and_not_with_a_forked_child() -> None:
    assert not os.path.exists(memory_root("exits"))
    assert not os.path.exists(memory_root("forked"))


def test_the_memory_store_of_a_killed_process_is_removed_by_the_next_one() -> None:
    left = memory_root("killed")
    assert os.path.exists(left)
    living = subprocess.Popen(
        [sys.executable, "-c", MEMORY_PROGRAM, "waits"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert living.stdout is not None
    try:
        kept = living.stdout.readline().strip()
        memory_root("exits")
        assert not os.path.exists(left)
        assert os.path.exists(kept), "its process lives"
    finally:
        living.communicate()
    assert not os.path.exists(kept)


def test_unknown_scheme_names_what_is_possible() -> None:
    with pytest.raises(ValueError, match="s3://"):
        open_store("ftp://host/x")


def test_bucket_urls_open_without_contacting_anybody() -> None:
    assert open_store("s3://bucket/some/prefix/").url == "s3://bucket/some/prefix"
    assert open_store("gs://bucket/p").url == "gs://bucket/p"
    assert isinstance(MemoryStore(), object)
