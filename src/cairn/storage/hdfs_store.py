"""HDFS as a store, through hdfs-native: the protocol of Hadoop's own client, without a JVM.

    hdfs://namenode:8020/path      a namenode
    hdfs://nameservice/path        a name service of hdfs-site.xml in HADOOP_CONF_DIR
    viewfs://cluster/path          a mount table of core-site.xml there

`hadoop_store` has the same over Hadoop's own client.

A new file of HDFS is visible before it is complete. So an object is written under a hidden name,
closed, and renamed. The namenode renames in one step: onto nothing, for put-if-absent, or in place
of what is there.

Always true here:
- an object is seen whole or not at all. When a write returns, datanodes have it, and its last
  block is on their disks;
- a put-if-absent has lost when the object exists and its hidden file was still there to be deleted:
  a rename that had succeeded would have taken it away;
- the client may send a rename twice, after a failover. The second one finds no hidden file, and
  its outcome is unknown.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from cairn.errors import PlanError
from cairn.storage.durable import target_of_temporary, temporary_path
from cairn.storage.store import (
    NotFoundError,
    Retry,
    Store,
    StoredObject,
    check_path,
    open_store,
    unknown_outcome,
)

T = TypeVar("T")

_COPY_CHUNK_BYTES: Final = 4 << 20
_DELETING_THREADS: Final = 8
_LISTINGS_MAX: Final = 5
# Our own retries come on top. Fifteen, the default, take three minutes.
_CONFIG: Final = {"dfs.client.failover.max.attempts": "2"}
_URL: Final = re.compile(r"([a-z]+)://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
# Answers of a namenode, and mistakes, after which a retry would fail again.
_PERMANENT: Final = re.compile(
    r"InvalidArgument|AccessControlException|QuotaExceeded|QuotaByStorageType|InvalidPathException"
    r"|NotDirectory|not a directory|PathComponentTooLong|MaxDirectoryItems|SASLError|GSSAPI"
    r"|NoSASLMechanism|Unsupported"
)


class HdfsStore(Store):
    """A folder in HDFS."""

    def __init__(self, url: str, retry: Retry, *, create: bool = True) -> None:
        self.url = url.rstrip("/")
        self._retry = retry
        self._client, self._root = self._open(create=create)
        if not create and not self._call("", lambda: self._has_folder()):
            raise NotFoundError(self.url)

    def __reduce__(self) -> Any:
        return open_store, (self.url,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def get(self, path: str) -> bytes:
        full = self._full(path)
        return self._call(path, lambda: bytes(self._client.read(full).read()))

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        full = self._full(path)

        def read() -> bytes:
            file = self._client.read(full)
            end = min(offset + length, len(file))  # hdfs-native panics beyond the end.
            return b"" if end <= offset else bytes(file.read_range(offset, end - offset))

        return self._call(path, read)

    def put(self, path: str, data: bytes) -> None:
        self.put_parts(path, [data])

    def put_parts(self, path: str, parts: Sequence[Any]) -> None:
        target = self._full(path)
        self._call(path, lambda: self._replace(target, parts))

    def put_file(self, path: str, local_file: str) -> None:
        target = self._full(path)

        def write() -> None:
            with open(local_file, "rb", buffering=0) as source:
                self._replace(target, iter(lambda: source.read(_COPY_CHUNK_BYTES), b""))

        self._call(path, write)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        target = self._full(path)
        # Nothing is visible before the rename, so a retry until then is harmless.
        temporary = self._call(path, lambda: self._write_hidden(target, [data]))
        try:
            self._client.rename(temporary, target)
        except FileExistsError as error:
            cause: BaseException = error
        except Exception as error:
            self._forget(temporary)
            if isinstance(error, PermissionError) or _PERMANENT.search(str(error)):
                raise
            raise unknown_outcome(self.url, path, error) from error
        else:
            return True
        try:
            if self._client.delete(temporary):
                return False
        except Exception as error:
            cause = error
        raise unknown_outcome(self.url, path, cause) from cause

    def move(self, src: str, dst: str) -> None:
        source, target = self._full(src), self._full(dst)

        def rename() -> None:
            try:
                self._client.rename(source, target, overwrite=True)
            except FileNotFoundError:
                if self._is_file(source):  # Then the folder of the target is missing.
                    self._client.mkdirs(os.path.dirname(target), create_parent=True)
                    self._client.rename(source, target, overwrite=True)
                elif not self._is_file(target):
                    raise

        self._call(src, rename)

    def delete(self, paths: Iterable[str]) -> None:
        full = [self._full(path) for path in paths]

        def remove(path: str) -> None:
            self._call(path, lambda: self._client.delete(path))

        if len(full) <= _DELETING_THREADS:
            for path in full:
                remove(path)
            return
        # The protocol has no delete of several files.
        with ThreadPoolExecutor(_DELETING_THREADS) as pool:
            for _ in pool.map(remove, full):
                pass

    def delete_folder(self, prefix: str) -> None:
        folder = self._full(prefix.rstrip("/"))
        self._call(prefix, lambda: self._client.delete(folder, recursive=True))

    def list(self, prefix: str = "") -> builtins.list[StoredObject]:
        found = (
            StoredObject(path, status.length, status.modification_time / 1000)
            for path, status in self._files(prefix)
            if not os.path.basename(path).startswith(".")
        )
        return sorted(found)

    def list_unfinished(self, prefix: str = "") -> dict[str, str]:
        found = ((path, target_of_temporary(path)) for path, _ in self._files(prefix))
        return {path: target for path, target in found if target is not None}

    def exists(self, path: str) -> bool:
        full = self._full(path)
        return self._call(path, lambda: self._is_file(full))

    def local_path(self, path: str) -> str | None:
        return None

    def _open(self, *, create: bool) -> tuple[Any, str]:
        """Return a client of the file system, and the path of the folder there."""
        match = _URL.fullmatch(self.url)
        assert match is not None, "the caller has looked at the scheme"
        return open_client(f"{match[1]}://{match[2]}" if match[2] else None), match[3] or ""

    def _full(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _has_folder(self) -> bool:
        try:
            return bool(self._client.get_file_info(self._root or "/").isdir)
        except FileNotFoundError:
            return False

    def _is_file(self, full: str) -> bool:
        try:
            return not self._client.get_file_info(full).isdir
        except FileNotFoundError:
            return False

    def _files(self, prefix: str) -> Iterator[tuple[str, Any]]:
        folder = f"{self._root}/{prefix.rstrip('/')}".rstrip("/")
        for status in self._call(prefix, lambda: self._list(folder or "/")):
            if not status.isdir and status.path.startswith(f"{folder}/"):
                yield status.path[len(self._root) + 1 :], status

    def _list(self, folder: str) -> builtins.list[Any]:
        for _ in range(_LISTINGS_MAX):
            try:
                return builtins.list(self._client.list_status(folder, recursive=True))
            except FileNotFoundError:
                try:
                    self._client.get_file_info(folder)
                except FileNotFoundError:
                    return []
                # A folder below it was removed meanwhile.
        raise _away(self.url, OSError(f"folders below {folder} keep vanishing"))

    def _replace(self, target: str, parts: Iterable[Any]) -> None:
        temporary = self._write_hidden(target, parts)
        try:
            self._client.rename(temporary, target, overwrite=True)
        except FileNotFoundError as error:
            # The client has sent it twice. Whether or not the first one arrived: write it again.
            self._forget(temporary)
            raise _away(self.url, error) from error
        except BaseException:
            self._forget(temporary)
            raise

    def _write_hidden(self, target: str, parts: Iterable[Any]) -> str:
        """Write a complete hidden file beside the target, and return its path."""
        temporary = temporary_path(target)
        try:
            file = self._client.create(temporary)
            is_empty = True
            for part in parts:
                if len(part):
                    file.write(part)
                    is_empty = False
            if not is_empty:
                file.hsync()
            file.close()
        except (FileNotFoundError, FileExistsError) as error:
            # A request that was sent twice, or a lease that is over.
            self._forget(temporary)
            raise _away(self.url, error) from error
        except BaseException:
            self._forget(temporary)
            raise
        return temporary

    def _forget(self, temporary: str) -> None:
        try:
            self._client.delete(temporary)
        except Exception:
            pass  # `list_unfinished` finds it.

    def _call(self, path: str, operation: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return operation()
            except (FileNotFoundError, FileExistsError, PermissionError):
                raise
            except (OSError, RuntimeError) as error:
                # hdfs-native has no numbers for errors of the network.
                if getattr(error, "errno", None) is None and not _PERMANENT.search(str(error)):
                    raise _away(self.url, error) from error
                raise

        try:
            return self._retry(attempt)
        except FileNotFoundError:
            raise NotFoundError(path) from None


def open_client(url: str | None) -> Any:
    """Return a client of a name service; None is the default one of Hadoop's configuration."""
    try:
        from hdfs_native import Client
    except ImportError as error:
        raise PlanError(
            f"{url or 'hdfs://'} needs hdfs-native\n"
            "  next: pip install 'cairn-state[hdfs]', for driver and executors",
            url=url,
        ) from error
    try:
        return Client(url, _CONFIG)
    except (RuntimeError, ValueError, OSError) as error:
        raise PlanError(
            f"cannot open {url or 'the default file system'}: {error}\n"
            "  expected: a host with its port, or a name of Hadoop's configuration\n"
            "  next: write the port of the namenode (8020), or set HADOOP_CONF_DIR "
            "for driver and executors",
            url=url,
        ) from error


def _away(url: str, cause: BaseException) -> ConnectionAbortedError:
    """Return the error after which the same call may succeed a little later."""
    return ConnectionAbortedError(errno.ECONNABORTED, f"{url}: {str(cause).splitlines()[0]}")


__all__ = ["HdfsStore", "open_client"]
