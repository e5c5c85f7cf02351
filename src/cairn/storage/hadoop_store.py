"""A folder in a file system that Hadoop's own client reaches, in a JVM.

    webhdfs://namenode:9870/path   HDFS over HTTP; swebhdfs:// with TLS
    hadoop+viewfs://cluster/path   a mount table of core-site.xml
    hadoop+hdfs://nameservice/…    HDFS by Hadoop's client instead of hdfs-native
    hadoop+<scheme>://…            any other that has a class: fs.<scheme>.impl

Objects are hidden files that are renamed, as in HDFS. So the file system must rename in one step:
onto nothing for put-if-absent, or in place of what is there.

Always true here:
- a file system whose class has no such rename of its own is refused when it is opened;
- whether the rename is exclusive is found out by a race when a job starts.
"""

from __future__ import annotations

from typing import Any, Final

from cairn.storage.hadoop_client import open_client
from cairn.storage.hdfs_store import HdfsStore
from cairn.storage.store import NotFoundError, hadoop_url

_RACERS: Final = 8


class HadoopStore(HdfsStore):
    """A folder that Hadoop's client reaches."""

    racers = _RACERS

    def _open(self, *, create: bool) -> tuple[Any, str]:
        try:
            return self._call("", lambda: open_client(hadoop_url(self.url), create=create))
        except NotFoundError:
            raise NotFoundError(self.url) from None


__all__ = ["HadoopStore"]
