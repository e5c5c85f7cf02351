"""HDFS and its like as a store: files that can be renamed, through `pyarrow.fs`.

Only sinks write there. A checkpoint needs put-if-absent with one winner. `pyarrow.fs` does not
offer it: its streams replace existing files.

Always true here:
- a file is written under a hidden name and renamed, so readers see all of it or nothing;
- an existing file is never changed: names come from content, and marks have fixed content;
- operations that need a single winner are refused, never imitated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow.fs as pafs

from cairn.errors import PlanError
from cairn.storage.durable import target_of_temporary, temporary_path
from cairn.storage.store import (
    NotFoundError,
    Store,
    StoredObject,
    check_path,
    open_store,
)

_COPY_CHUNK_BYTES: Final = 4 << 20


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a url, and the path in it."""
    try:
        filesystem, path = pafs.FileSystem.from_uri(url)
    except (OSError, ImportError) as error:
        raise PlanError(
            f"cannot open {url!r}: {str(error).splitlines()[0]}\n"
            "  next: libhdfs needs JAVA_HOME, HADOOP_HOME and "
            "CLASSPATH=$(hadoop classpath --glob), in the driver and in the executors",
            url=url,
        ) from error
    return filesystem, path


class ArrowStore(Store):
    """A folder in a `pyarrow.fs` file system."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, path = open_filesystem(self.url)
        self._root = path.rstrip("/")

    def __reduce__(self) -> Any:
        return open_store, (self.url,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def get(self, path: str) -> bytes:
        try:
            with self._fs.open_input_stream(self._full(path), compression=None) as file:
                return bytes(file.read())
        except FileNotFoundError:
            raise NotFoundError(path) from None

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        try:
            with self._fs.open_input_file(self._full(path)) as file:
                size = file.size()
                if offset >= size:
                    return b""
                return bytes(file.read_at(min(length, size - offset), offset))
        except FileNotFoundError:
            raise NotFoundError(path) from None

    def put(self, path: str, data: bytes) -> None:
        self._replace(path, [data])

    def put_file(self, path: str, local_file: str) -> None:
        with open(local_file, "rb") as source:
            self._replace(path, iter(lambda: source.read(_COPY_CHUNK_BYTES), b""))

    def put_if_absent(self, path: str, data: bytes) -> bool:
        raise PlanError(
            f"{self.url!r} can hold the files of a sink, but no checkpoint and no list of files\n"
            "  two writers of one file there can both succeed\n"
            "  next: keep the checkpoint on a shared disk, s3://, gs:// or az://",
            url=self.url,
        )

    def move(self, src: str, dst: str) -> None:
        source, target = self._full(src), self._full(dst)
        if not self._is_file(source):
            if not self._is_file(target):
                raise NotFoundError(src)
            return
        self._rename(source, target)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            try:
                self._fs.delete_file(self._full(path))
            except FileNotFoundError:
                continue

    def list(self, prefix: str = "") -> list[StoredObject]:
        found = (
            StoredObject(path, info.size, (info.mtime_ns or 0) / 1e9)
            for path, info in self._infos(prefix)
            if not info.base_name.startswith(".")
        )
        return sorted(found)

    def list_unfinished(self, prefix: str = "") -> dict[str, str]:
        found = ((path, target_of_temporary(path)) for path, _ in self._infos(prefix))
        return {path: target for path, target in found if target is not None}

    def _infos(self, prefix: str) -> Iterator[tuple[str, Any]]:
        folder = f"{self._root}/{prefix.rstrip('/')}".rstrip("/")
        selector = pafs.FileSelector(folder, allow_not_found=True, recursive=True)
        # Some file systems return paths with a leading slash, others without.
        root = self._root.strip("/")
        for info in self._fs.get_file_info(selector):
            if info.type == pafs.FileType.File:
                yield info.path.strip("/").removeprefix(root).lstrip("/"), info

    def exists(self, path: str) -> bool:
        return self._is_file(self._full(path))

    def local_path(self, path: str) -> str | None:
        return None

    def _full(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _is_file(self, full: str) -> bool:
        return bool(self._fs.get_file_info(full).type == pafs.FileType.File)

    def _replace(self, path: str, chunks: Iterable[bytes]) -> None:
        target = self._full(path)
        self._fs.create_dir(os.path.dirname(target), recursive=True)
        temporary = temporary_path(target)
        try:
            with self._fs.open_output_stream(temporary, compression=None) as file:
                for chunk in chunks:
                    file.write(chunk)
            self._rename(temporary, target)
        except BaseException:
            if self._is_file(temporary):
                self._fs.delete_file(temporary)
            raise

    def _rename(self, source: str, target: str) -> None:
        self._fs.create_dir(os.path.dirname(target), recursive=True)
        try:
            self._fs.move(source, target)
        except OSError:
            # HDFS does not rename onto an existing file. The existing one has the same content.
            # Deleting it first would unpublish it, if this process died right after.
            if not self._is_file(target):
                raise
            if self._is_file(source):
                self._fs.delete_file(source)
