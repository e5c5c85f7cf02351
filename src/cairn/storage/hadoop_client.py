"""A file system of Hadoop by Hadoop's own client, with the calls of hdfs-native that a store makes.

Small objects travel inside the calls to the JVM, large ones through a file on the local disk: the
calls carry text, and bytes would have to be encoded.

Always true here:
- an error of the JVM becomes the Python error that hdfs-native raises in such a case, and an
  OSError without a number if the same call may succeed later;
- a file that is created is closed, also when writing it fails.
"""

from __future__ import annotations

import contextlib
import errno
import re
import tempfile
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from cairn.errors import PlanError
from cairn.storage.hadoop_jvm import Jvm, connect, disconnect

_INLINE_BYTES_MAX: Final = 64 << 10
_BUFFER_BYTES: Final = 256 << 10
_URL: Final = re.compile(r"([a-z][a-z0-9.+-]*://[^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
_MISSING: Final = re.compile(r"FileNotFoundException|NoSuchFileException|PathNotFoundException")
_EXISTS: Final = re.compile(r"FileAlreadyExistsException|PathExistsException")
_REFUSED: Final = re.compile(r"AccessControlException|AccessDeniedException|AuthorizationException")
# The client itself fails: no server was asked, and the same call would fail again.
_WRONG: Final = re.compile(
    r"IllegalArgumentException|ClassNotFoundException|NoClassDefFoundError|LinkageError"
    r"|UnsupportedFileSystemException|UnsupportedOperationException|NotInMountpointException"
    r"|ViewFs: Cannot initialize"
)


class Status(NamedTuple):
    path: str
    length: int
    isdir: bool
    modification_time: int


class HadoopClient:
    """The file system of a url without a path."""

    def __init__(self, url: str) -> None:
        self._url = url

    def create(self, path: str) -> Writer:
        with self._java() as java:
            out = java.file_system(self._url).create(self._path(java, path), False)
            return Writer(self, java, out)

    def read(self, path: str) -> Reader:
        found = self.get_file_info(path)
        if found.isdir:
            raise FileNotFoundError(f"{path} is a folder")
        return Reader(self, path, found.length)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with self._java() as java:
            stream = java.file_system(self._url).open(self._path(java, path))
            try:
                if offset:
                    stream.seek(offset)
                if length <= _INLINE_BYTES_MAX:
                    data = bytes(stream.readNBytes(length))
                else:
                    data = _read_by_file(java, stream, length)
            finally:
                stream.close()
        if len(data) != length:
            raise OSError(f"{path}: expected {length} bytes from {offset}, found {len(data)}")
        return data

    def rename(self, source: str, target: str, overwrite: bool = False) -> None:
        with self._java() as java:
            kinds = _rename_kinds(java, overwrite=overwrite)
            files = java.file_system(self._url)
            files.rename(self._path(java, source), self._path(java, target), kinds)

    def delete(self, path: str, recursive: bool = False) -> bool:
        with self._java() as java:
            files = java.file_system(self._url)
            return bool(files.delete(self._path(java, path), recursive))

    def mkdirs(self, path: str, create_parent: bool = False) -> None:
        with self._java() as java:
            java.file_system(self._url).mkdirs(self._path(java, path))

    def get_file_info(self, path: str) -> Status:
        with self._java() as java:
            return _status(java.file_system(self._url).getFileStatus(self._path(java, path)))

    def list_status(self, path: str, recursive: bool = False) -> Iterator[Status]:
        with self._java() as java:
            # Page by page: a folder may have more entries than fit into the JVM.
            entries = java.file_system(self._url).listStatusIterator(self._path(java, path))
            found = []
            while entries.hasNext():
                found.append(_status(entries.next()))
        for status in found:
            yield status
            if recursive and status.isdir:
                yield from self.list_status(status.path, recursive=True)

    def resolve(self, path: str) -> str:
        """Return the url that a mount table leads to; the path must exist."""
        with self._java() as java:
            found = java.file_system(self._url).resolvePath(self._path(java, path or "/"))
            return str(found.toString())

    def kind(self) -> str:
        """Return the name of Hadoop's class for this file system."""
        with self._java() as java:
            return str(java.file_system(self._url).getClass().getName())

    def renames_in_one_step(self) -> bool:
        """True if the class renames by itself, onto nothing or in place of a file.

        Others inherit a rename that looks at the target, removes it, and then renames.
        """
        with self._java() as java:
            some_class = java.gateway.jvm.java.lang.Class
            parameters = java.gateway.new_array(some_class, 3)
            parameters[0] = parameters[1] = self._path(java, "/").getClass()
            parameters[2] = _rename_kinds(java, overwrite=False).getClass()
            kind = java.file_system(self._url).getClass()
            try:
                kind.getMethod("rename", parameters)  # Finds public ones only.
            except Exception as error:
                if "NoSuchMethodException" in str(error):
                    return False
                raise
            return True

    def _path(self, java: Jvm, path: str) -> Any:
        return java.classes.fs.Path(f"{self._url}{path}")

    @contextlib.contextmanager
    def _java(self) -> Iterator[Jvm]:
        jvm = connect()
        with java_errors(jvm):
            yield jvm


class Writer:
    """A file that is being written."""

    def __init__(self, client: HadoopClient, jvm: Jvm, out: Any) -> None:
        self._client = client
        self._jvm = jvm
        self._out = out

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with self._errors():
            if len(view) <= _INLINE_BYTES_MAX:
                self._out.write(bytearray(view))
            else:
                self._write_by_file(view)
        return len(view)

    def hsync(self) -> None:
        with self._errors():
            self._out.hsync()

    def close(self) -> None:
        with self._errors():
            out, self._out = self._out, None
            if out is not None:
                out.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _write_by_file(self, data: memoryview) -> None:
        jvm = self._jvm
        with tempfile.NamedTemporaryFile(prefix="cairn-hadoop-") as file:
            file.write(data)
            file.flush()
            source = jvm.gateway.jvm.java.io.FileInputStream(file.name)
            try:
                jvm.classes.io.IOUtils.copyBytes(source, self._out, _BUFFER_BYTES, False)
            finally:
                source.close()

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return java_errors(self._jvm)


class Reader:
    def __init__(self, client: HadoopClient, path: str, length: int) -> None:
        self._client = client
        self._path = path
        self._length = length

    def __len__(self) -> int:
        return self._length

    def read(self) -> bytes:
        return self.read_range(0, self._length)

    def read_range(self, offset: int, length: int) -> bytes:
        return self._client.read_range(self._path, offset, length)


def split_url(url: str) -> tuple[str, str]:
    """Return the url without its path, and the path."""
    match = _URL.fullmatch(url)
    assert match is not None, "the caller has looked at the scheme"
    return match[1], match[2] or ""


@contextlib.contextmanager
def java_errors(jvm: Jvm) -> Iterator[None]:
    """Turn errors of the JVM into those of Python."""
    from py4j.protocol import Py4JError, Py4JJavaError

    try:
        try:
            yield
        except Py4JJavaError as error:
            raise _translate(str(error.java_exception.toString())) from None
    except (Py4JError, ConnectionError) as error:
        disconnect(jvm)
        raise OSError(f"the JVM of Hadoop's client has ended: {error}") from error


def _translate(text: str) -> Exception:
    kind = text.partition(": ")[0]
    if _MISSING.search(kind):
        return FileNotFoundError(text)
    if _EXISTS.search(kind):
        return FileExistsError(text)
    if _REFUSED.search(text):
        return PermissionError(text)
    if _WRONG.search(text):
        return OSError(errno.EINVAL, text)
    return OSError(text)


def _status(found: Any) -> Status:
    return Status(
        path=found.getPath().toUri().getPath(),
        length=found.getLen(),
        isdir=found.isDirectory(),
        modification_time=found.getModificationTime(),
    )


def _rename_kinds(java: Jvm, *, overwrite: bool) -> Any:
    kind = getattr(java.classes.fs, "Options$Rename")
    kinds = java.gateway.new_array(kind, 1)
    kinds[0] = kind.OVERWRITE if overwrite else kind.NONE
    return kinds


def _read_by_file(java: Jvm, stream: Any, length: int) -> bytes:
    with tempfile.NamedTemporaryFile(prefix="cairn-hadoop-") as file:
        out = java.gateway.jvm.java.io.FileOutputStream(file.name)
        try:
            source = java.gateway.jvm.java.nio.channels.Channels.newChannel(stream)
            target, done = out.getChannel(), 0
            while done < length and (count := target.transferFrom(source, done, length - done)):
                done += count
        finally:
            out.close()
        return file.read()


def open_client(url: str, *, create: bool) -> tuple[HadoopClient, str]:
    """Return a client of the file system at a url, and the path there; mounts are followed.

    PlanError if Hadoop does not know the scheme, or if the file system cannot keep what a
    checkpoint needs. With `create` a missing folder behind a mount is made: only then it can be
    followed.
    """
    where, path = split_url(url)
    client = HadoopClient(where)
    try:
        if where.lower().startswith("viewfs:"):
            if create:
                client.mkdirs(path)
            where, path = split_url(client.resolve(path))
            client = HadoopClient(where)
        kind = client.kind()
        client.get_file_info("/")  # A client that lacks classes says so here.
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        found = str(error.strerror)
        missing = "the jars that it needs on CLASSPATH, and its settings in HADOOP_CONF_DIR"
        named = "a host with its port, or a name service of HADOOP_CONF_DIR"
        is_named = "UnknownHost" in found
        raise PlanError(
            f"Hadoop's client cannot open {url}: {found}\n"
            f"  expected: {named if is_named else missing}\n"
            "  next: correct it for driver, executors and the command line",
            url=url,
        ) from None
    if not client.renames_in_one_step():
        raise PlanError(
            f"{url} cannot hold a checkpoint: {kind} does not rename in one step\n"
            "  expected: a file system that refuses a rename onto a file that exists, and can "
            "replace one, as HDFS and WebHDFS do\n"
            "  two drivers could lead the job at once, and publish its output twice\n"
            "  next: use hdfs://, webhdfs:// or viewfs:// over them; a bucket by s3://, gs:// or "
            "az://; a folder that is mounted on every host by its path",
            url=url,
        )
    return client, path


__all__ = ["HadoopClient", "java_errors", "open_client", "split_url"]
