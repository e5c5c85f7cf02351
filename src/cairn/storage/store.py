"""Objects by path, on a local disk or in a bucket, with one atomic put-if-absent.

Everything cairn keeps goes through a `Store`. A store is cheap to make again from
its `url`, and pickles as that url, so a slot process opens its own.

Local writes do not go through obstore, because it does not fsync: they are a
hidden temporary file, fsync, then link or rename, then fsync of the directory.

Always true here:
- an object is seen whole or not at all, and when a write returns it is durable;
- `put_if_absent` has at most one winner, and is never repeated behind the caller's
  back: when its outcome is unknown it raises CommitUnknownError;
- every other operation gives the same result when done twice, so it may be retried;
- a full disk is not retried.
"""

from __future__ import annotations

import builtins
import errno
import functools
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions as obstore_errors
from obstore import store as obstore_stores

from cairn.backoff import backoff_s, jitter
from cairn.errors import CommitUnknownError, RestoreError
from cairn.storage.credentials import provider_for
from cairn.storage.durable import (
    copy_all,
    fsync_folder,
    make_folders,
    target_of_temporary,
    write_all,
    write_temporary,
)
from cairn.storage.memory import memory_folder

T = TypeVar("T")

ATTEMPTS_MAX: Final = 5
_BUCKET_SCHEMES: Final = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss"})
_HDFS_SCHEMES: Final = frozenset({"hdfs", "viewfs"})
_HADOOP_SCHEMES: Final = frozenset({"webhdfs", "swebhdfs"})
_HADOOP_PREFIX: Final = "hadoop+"
HADOOP_JVM_MB: Final = 256
"""Memory of the JVM of Hadoop's client at most: its heap, and what it needs beside that."""

# Errors after which certainly nothing was written, and a retry would fail again.
_PERMANENT: Final = (
    obstore_errors.AlreadyExistsError,
    obstore_errors.InvalidPathError,
    obstore_errors.NotSupportedError,
    obstore_errors.PermissionDeniedError,
    obstore_errors.PreconditionError,
    obstore_errors.UnauthenticatedError,
    obstore_errors.UnknownConfigurationKeyError,
)
_TRANSIENT_ERRNOS: Final = frozenset(
    {
        errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET,
        errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT,
    }
)  # fmt: skip
_RANGE_BEYOND_END: Final = re.compile(r"InvalidRange|StartTooLarge|416")


class NotFoundError(KeyError):
    """The path has no object. Internal: callers turn it into a CairnError."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"no object at {self.path!r}"


class StoredObject(NamedTuple):
    path: str
    size: int
    modified_s: float


class Store(ABC):
    """Objects below one url. Paths are relative, with forward slashes."""

    url: str
    racers: int = 1
    """A start makes this many conditional puts of one object at once, and at most one may win."""

    @abstractmethod
    def get(self, path: str) -> bytes:
        """Return the whole object, or raise NotFoundError."""

    @abstractmethod
    def get_range(self, path: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset`; fewer if the object ends before that."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write or replace an object. Only for content-addressed or private objects."""

    def put_parts(self, path: str, parts: Sequence[Any]) -> None:
        """Like `put`, for bytes in several buffers."""
        self.put(path, b"".join(parts))

    @abstractmethod
    def put_file(self, path: str, local_file: str) -> None:
        """Like `put`, streaming the content of a local file."""

    @abstractmethod
    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create the object. False if it exists; CommitUnknownError if the outcome is unknown."""

    @abstractmethod
    def move(self, src: str, dst: str) -> None:
        """Rename, replacing `dst`. Does nothing if `dst` exists and `src` does not."""

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects, in any order. Missing ones are ignored."""

    def delete_folder(self, prefix: str) -> None:
        """Remove everything below a folder, in any order; hidden names too."""
        self.delete([found.path for found in self.list(prefix)])

    @abstractmethod
    def list(self, prefix: str = "") -> list[StoredObject]:
        """Return all objects below a folder, sorted by path, without hidden names."""

    def list_unfinished(self, prefix: str = "") -> dict[str, str]:
        """Return the temporary files below a folder, with their targets."""
        return {}

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    @abstractmethod
    def local_path(self, path: str) -> str | None:
        """Return the file of this object, if the store is a local folder."""


class Retry:
    """Repeats operations of a store that fail for a reason which may pass."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep

    def __call__(self, operation: Callable[[], T]) -> T:
        for failures in range(1, ATTEMPTS_MAX):
            try:
                return operation()
            except Exception as error:
                if not is_transient(error):
                    raise
            self._sleep(jitter(backoff_s(failures)))
        return operation()


def is_transient(error: BaseException) -> bool:
    """True if the same call may succeed a little later."""
    if isinstance(error, _PERMANENT) or is_not_found(error):
        return False
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT_ERRNOS or isinstance(error, TimeoutError)
    return isinstance(error, obstore_errors.BaseError)


def is_away(error: BaseException) -> bool:
    """True if a store could not be reached but may be later; never for a local disk."""
    if isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError)
    return is_transient(error)


def is_not_found(error: BaseException) -> bool:
    return isinstance(error, NotFoundError | FileNotFoundError | obstore_errors.NotFoundError)


def open_store(
    url: str,
    *,
    retry: Retry | None = None,
    create: bool = True,
    options: Mapping[str, str] | None = None,
) -> Store:
    """Open the store at a local path, file://, s3://, gs://, az://, hdfs:// or memory: url.

    Hadoop's client opens webhdfs://, and urls of any scheme that begin with `hadoop+`.

    `memory:` is a new local folder in memory, `memory:name` the same one each time within this
    process (see `memory`). A missing local folder is created; with `create=False` it is a
    NotFoundError. `options` are those of a bucket, under the names of object_store
    (`AWS_REGION` …); others are ignored.
    """
    retry = retry or Retry()
    parts = urlsplit(url)
    if parts.scheme == "memory":
        # The name means nothing to other processes, so the url is that of the folder.
        return LocalStore(memory_folder(url[len("memory:") :].strip("/")), retry)
    if parts.scheme in _BUCKET_SCHEMES:
        # We retry: a retry inside obstore could repeat a put without our knowledge.
        settings = _bucket_settings(options or {})
        provider = provider_for(url, settings.get("config", {}))
        if provider is not None:
            settings["credential_provider"] = provider
        bucket: Any = obstore_stores.from_url(url, retry_config={"max_retries": 0}, **settings)
        return ObjectStore(url.rstrip("/"), bucket, retry)
    if parts.scheme in _HDFS_SCHEMES:
        from cairn.storage.hdfs_store import HdfsStore

        return HdfsStore(url, retry, create=create)
    if is_hadoop(url):
        from cairn.storage.hadoop_store import HadoopStore

        return HadoopStore(url, retry, create=create)
    if parts.scheme != "file" and "://" in url:
        raise ValueError(
            f"cannot open a store at {url!r}: unknown scheme {parts.scheme!r}\n"
            "  next: use a local path, file://, s3://, gs://, az://, hdfs://, webhdfs:// or "
            f"memory:, or hadoop+{parts.scheme}:// if Hadoop's client can open it"
        )
    return LocalStore(file_path(url) if parts.scheme == "file" else url, retry, create=create)


def _bucket_settings(options: Mapping[str, str]) -> dict[str, Any]:
    given = {name.lower(): value for name, value in options.items()}
    is_plain = given.get("allow_http", given.get("aws_allow_http", "false")).lower() == "true"
    config = {
        name: value
        for name, value in given.items()
        if name.startswith(("aws_", "azure_", "google_"))
        and not name.startswith("aws_s3_")
        and name != "aws_allow_http"
    }
    settings: dict[str, Any] = {"config": config} if config else {}
    return settings | ({"client_options": {"allow_http": True}} if is_plain else {})


@functools.lru_cache(maxsize=64)
def other_store(url: str) -> Store:
    """Open the store of another checkpoint that this one refers to, or raise RestoreError."""
    try:
        return open_store(url, create=False)
    except NotFoundError:
        raise RestoreError(
            f"the checkpoint that holds a part of this one's state is gone\n"
            f"  expected: {url}\n"
            "  next: put it back where it was",
            url=url,
        ) from None


def file_path(url: str) -> str:
    """Return the path in a file: url, literally as Spark does: `#` and `%` are part of names."""
    return re.sub(r"^file:(//[^/]*)?", "", url, flags=re.IGNORECASE)


class ObjectStore(Store):
    """A store of obstore; reads of local files use it too."""

    def __init__(self, url: str, inner: Any, retry: Retry) -> None:
        self.url = url
        self._inner = inner
        self._retry = retry

    def __reduce__(self) -> Any:
        return open_store, (self.url,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def get(self, path: str) -> bytes:
        return self._call(path, lambda: bytes(self._inner.get(path).bytes()))

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        if length == 0:
            return b""

        def read() -> bytes:
            try:
                return bytes(self._inner.get_range(path, start=offset, length=length))
            except obstore_errors.GenericError as error:
                # The range is beyond the end. A retry would not help.
                if _RANGE_BEYOND_END.search(str(error)):
                    return b""
                raise

        return self._call(path, read)

    def put(self, path: str, data: bytes) -> None:
        self._call(path, lambda: self._inner.put(check_path(path), data))

    def put_file(self, path: str, local_file: str) -> None:
        def write() -> None:
            with open(local_file, "rb") as source:
                self._inner.put(check_path(path), source)

        self._retry(write)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        try:
            # In one request: a multipart upload cannot be conditional everywhere.
            self._inner.put(check_path(path), data, mode="create", use_multipart=False)
        except (obstore_errors.AlreadyExistsError, obstore_errors.PreconditionError):
            return False
        except (*_PERMANENT, ValueError):
            raise
        except Exception as error:
            raise unknown_outcome(self.url, path, error) from error
        return True

    def move(self, src: str, dst: str) -> None:
        try:
            self._call(src, lambda: self._inner.rename(src, check_path(dst)))
        except NotFoundError:
            if not self.exists(dst):
                raise

    def delete(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        try:
            # In bulk: a bucket deletes a thousand in one request.
            self._call("", lambda: self._inner.delete(paths) if paths else None)
            return
        except NotFoundError:
            pass  # Some stores stop at a missing object.
        for path in paths:
            try:
                self._call(path, lambda path=path: self._inner.delete(path))  # type: ignore[misc]
            except NotFoundError:
                continue

    def delete_folder(self, prefix: str) -> None:
        found = self._retry(lambda: self._list(prefix, hidden=True))
        self.delete([o.path for o in found])

    def list(self, prefix: str = "") -> list[StoredObject]:
        return self._retry(lambda: self._list(prefix, hidden=False))

    def _list(self, prefix: str, *, hidden: bool) -> builtins.list[StoredObject]:
        found = []
        for chunk in obstore.list(self._inner, prefix.rstrip("/") or None, chunk_size=1000):
            for meta in chunk:
                path = meta["path"]
                if hidden or not path.rpartition("/")[2].startswith("."):
                    modified_s = meta["last_modified"].timestamp()
                    found.append(StoredObject(path, meta["size"], modified_s))
        return sorted(found)

    def exists(self, path: str) -> bool:
        try:
            self._call(path, lambda: self._inner.head(path))
        except NotFoundError:
            return False
        return True

    def local_path(self, path: str) -> str | None:
        return None

    def _call(self, path: str, operation: Callable[[], T]) -> T:
        try:
            return self._retry(operation)
        except Exception as error:
            if is_not_found(error):
                raise NotFoundError(path) from None
            raise


class LocalStore(ObjectStore):
    """A local folder. Reads like any other store; writes survive a power cut."""

    def __init__(self, root: str, retry: Retry, *, create: bool = True) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        if create:
            os.makedirs(self.root, exist_ok=True)
        elif not os.path.isdir(self.root):
            raise NotFoundError(self.root)
        super().__init__(f"file://{self.root}", obstore_stores.LocalStore(self.root), retry)

    def __reduce__(self) -> Any:
        return open_store, (self.root,)

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        # Not through obstore, which copies twice and takes a third of the time of a table read.
        source = os.path.join(self.root, check_path(path))

        def read() -> bytes:
            try:
                file = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise NotFoundError(path) from None
            try:
                return _read_all(file, offset, length)
            finally:
                os.close(file)

        return self._retry(read)

    def put(self, path: str, data: bytes) -> None:
        self._retry(lambda: self._replace(path, lambda file: write_all(file, data)))

    def put_parts(self, path: str, parts: Sequence[Any]) -> None:
        def fill(file: int) -> None:
            for part in parts:
                write_all(file, part)

        self._retry(lambda: self._replace(path, fill))

    def put_file(self, path: str, local_file: str) -> None:
        self._retry(lambda: self._replace(path, lambda file: copy_all(file, local_file)))

    def put_if_absent(self, path: str, data: bytes) -> bool:
        target = self._target(path)
        # Nothing is visible before the link, so a retry until then is harmless.
        temporary = self._retry(lambda: write_temporary(target, lambda file: write_all(file, data)))
        linked = False
        try:
            try:
                os.link(temporary, target)
                linked = True
            except FileExistsError:
                return False
            finally:
                os.unlink(temporary)
            fsync_folder(os.path.dirname(target))
        except OSError as error:
            if linked or error.errno in _TRANSIENT_ERRNOS:
                raise unknown_outcome(self.url, path, error) from error
            raise
        return True

    def move(self, src: str, dst: str) -> None:
        source, target = os.path.join(self.root, check_path(src)), self._target(dst)

        def rename() -> None:
            try:
                os.replace(source, target)
            except FileNotFoundError:
                if not os.path.exists(target):
                    raise NotFoundError(src) from None
            fsync_folder(os.path.dirname(target))
            if os.path.dirname(source) != os.path.dirname(target):
                fsync_folder(os.path.dirname(source))

        self._retry(rename)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            try:
                os.unlink(os.path.join(self.root, check_path(path)))
            except (FileNotFoundError, NotADirectoryError):
                continue
        # Not fsynced: a deletion undone by a power cut leaves an orphan, nothing worse.

    def delete_folder(self, prefix: str) -> None:
        folder = os.path.join(self.root, check_path(prefix.rstrip("/")))
        try:
            self._retry(lambda: shutil.rmtree(folder))
        except (FileNotFoundError, NotADirectoryError):
            pass

    def list_unfinished(self, prefix: str = "") -> dict[str, str]:
        found = {}
        for folder, _, names in os.walk(os.path.join(self.root, prefix)):
            for name in names:
                path = os.path.relpath(os.path.join(folder, name), self.root)
                if (target := target_of_temporary(path)) is not None:
                    found[path] = target
        return found

    def local_path(self, path: str) -> str | None:
        return os.path.join(self.root, check_path(path))

    def _replace(self, path: str, fill: Callable[[int], None]) -> None:
        target = self._target(path)
        temporary = write_temporary(target, fill)
        try:
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
        fsync_folder(os.path.dirname(target))

    def _target(self, path: str) -> str:
        target = os.path.join(self.root, check_path(path))
        folder = os.path.dirname(target)
        if not os.path.isdir(folder):
            self._retry(lambda: make_folders(self.root, folder))
        return target


def is_bucket(url: str) -> bool:
    """True for the url of an object store, where files are copied instead of renamed."""
    return urlsplit(url).scheme in _BUCKET_SCHEMES


def is_hadoop(url: str) -> bool:
    """True for the url of a file system that is reached by Hadoop's client, in a JVM."""
    scheme = urlsplit(url).scheme
    return scheme in _HADOOP_SCHEMES or scheme.startswith(_HADOOP_PREFIX)


def hadoop_url(url: str) -> str:
    """Return the url as Hadoop names it."""
    return url.removeprefix(_HADOOP_PREFIX)


def check_path(path: str) -> str:
    """Return the path. ValueError if it could lead out of its store."""
    if not path or path.startswith("/") or any(p in ("", ".", "..") for p in path.split("/")):
        raise ValueError(f"not a path inside a store: {path!r}")
    return path


def unknown_outcome(url: str, path: str, cause: BaseException) -> CommitUnknownError:
    """Return the error of a put-if-absent that may have happened."""
    return CommitUnknownError(
        f"it is unknown if the store has created {path!r}\n"
        f"  store: {url}\n"
        f"  cause: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}\n"
        "  next: read the object back before trying again",
        url=url,
        path=path,
    )


def _read_all(file: int, offset: int, length: int) -> bytes:
    data = os.pread(file, length, offset)
    while len(data) < length:
        more = os.pread(file, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
