"""Where the job publishes: one target per kind of sink, as its readers see it.

A target is made from the folder alone, in the driver and in who watches it.

Always true here:
- `rows` is what a reader sees at one moment;
- `leftovers` looks for everything that is stored and not published.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq

from cairn import sinks
from cairn.ids import digest
from cairn.storage.store import open_store
from tests import servers
from tests.soak.events import OUT, Events, Row
from tests.spark.support import eventually

COLUMNS = Row._fields


@dataclass(frozen=True)
class Site:
    """Where everything of one job lies."""

    folder: str
    postgres: str = ""
    """The URI of a database of its own."""
    redis: str = ""

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    def save(self) -> Site:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "site.json").write_text(json.dumps(asdict(self)))
        return self

    @classmethod
    def load(cls, folder: str) -> Site:
        return cls(**json.loads((Path(folder) / "site.json").read_text()))


def new_site(folder: Path) -> Site:
    """With a database of its own, on the servers of this process."""
    redis = f"unix://{servers.redis().socket_file}?db=0"
    return Site(str(folder), servers.postgres().new_database(), redis).save()


class Target(ABC):
    """What the tests ask of a target."""

    is_keyed: ClassVar[bool] = False
    """One row per account: the last one."""
    may_repeat: ClassVar[bool] = False
    """A commit that did not get to its end publishes its epoch again."""
    shows_epochs: ClassVar[bool] = True
    """Readers see whole epochs, in order."""
    pieces: ClassVar[bool] = False
    """It has an epoch in several pieces, and so passes driver.sink.piece."""

    def __init__(self, site: Site) -> None:
        self.site = site

    @abstractmethod
    def sink(self) -> Any:
        """As a program makes it."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """What a reader sees now."""

    @abstractmethod
    def leftovers(self) -> list[str]: ...

    def batches(self) -> dict[int, tuple[int, int]]:
        """{batch: (rows it has, rows that are visible)} at one moment."""
        found: dict[int, tuple[int, int]] = {}
        for row in self.rows():
            found[row.batch] = (row.size, found.get(row.batch, (0, 0))[1] + 1)
        return found

    def check(self, events: Events) -> None:
        """At the end: everything is there, nothing twice, nothing else."""
        if self.is_keyed:
            events.check_latest(self.rows())
        else:
            events.check_rows(self.rows(), may_repeat=self.may_repeat)
        # Slots of a driver that was killed see that it is gone a moment later.
        eventually(lambda: not self.leftovers(), within_s=20)
        left = self.leftovers()
        assert not left, f"left behind by {type(self).__name__}: {left[:5]}"


# Files


class FilesTarget(Target):
    pieces = True

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.out = site.path / "files"
        self._counted: dict[str, dict[int, tuple[int, int]]] = {}

    def sink(self) -> Any:
        return sinks.Files(str(self.out), file_bytes_target=1)

    def rows(self) -> list[Row]:
        return [
            _row(each)
            for file in sinks.list_published(str(self.out))
            for each in pq.read_table(file).to_pylist()
        ]

    def batches(self) -> dict[int, tuple[int, int]]:
        # Files never change: each is read once.
        found: dict[int, tuple[int, int]] = {}
        for file in sinks.list_published(str(self.out)):
            if file not in self._counted:
                table = pq.read_table(file, columns=["batch", "size"]).to_pylist()
                counted: dict[int, tuple[int, int]] = {}
                for each in table:
                    count = counted.get(each["batch"], (0, 0))[1]
                    counted[each["batch"]] = (each["size"], count + 1)
                self._counted[file] = counted
            for batch, (size, count) in self._counted[file].items():
                found[batch] = (size, found.get(batch, (0, 0))[1] + count)
        return found

    def leftovers(self) -> list[str]:
        stored = [found.path for found in open_store(str(self.out)).list()]
        listed = {os.path.relpath(file, self.out) for file in sinks.list_published(str(self.out))}
        data = [path for path in stored if path.endswith(".parquet")]
        return [path for path in data if path not in listed]


# PostgreSQL


class PostgresTarget(Target):
    mode: ClassVar[str] = "append"

    @property
    def table(self) -> str:
        return f"out_{self.mode}"

    def sink(self) -> Any:
        key = ("account",) if self.is_keyed else ()
        mode: Any = self.mode
        return sinks.Postgres(self.site.postgres, self.table, mode=mode, key=key, create=True)

    def _ask(self, query: str) -> list[Any]:
        import psycopg

        with psycopg.connect(self.site.postgres, autocommit=True, connect_timeout=5) as connection:
            return connection.execute(query).fetchall()

    def _has_table(self, name: str) -> bool:
        return bool(self._ask(f"select to_regclass('{name}') is not null")[0][0])

    def rows(self) -> list[Row]:
        return [Row(*each) for each in self._ask(f"select {', '.join(COLUMNS)} from {self.table}")]

    def batches(self) -> dict[int, tuple[int, int]]:
        if not self._has_table(self.table):
            return {}
        query = f"select batch, min(size), count(*) from {self.table} group by batch"
        return {batch: (size, count) for batch, size, count in self._ask(query)}

    def leftovers(self) -> list[str]:
        left = self._ask(
            "select 'prepared transaction ' || gid from pg_prepared_xacts "
            "where database = current_database() "
            "union all select 'connection ' || application_name || ': ' || left(query, 80) "
            "from pg_stat_activity where datname = current_database() "
            # Not our own looks: one that was closed a moment ago may still be listed.
            "and application_name like 'cairn:%' and backend_type = 'client backend' "
            "union all select 'table ' || tablename from pg_tables "
            "where schemaname not in ('pg_catalog', 'information_schema') "
            "and tablename not like 'out\\_%' and tablename not in "
            "('cairn_sinks', 'cairn_marks', 'cairn_staged', 'cairn_proofs')"
        )
        left += self._ask("select 'staged ' || place from cairn_staged")
        return [text for (text,) in left]


class PostgresUpsertTarget(PostgresTarget):
    mode = "upsert"
    is_keyed = True
    shows_epochs = False


class PostgresPreparedTarget(PostgresTarget):
    mode = "prepared"
    shows_epochs = False
    pieces = True


# Rows that ride in the epoch


class StagedTarget(Target):
    """Its rows wait in the checkpoint until they are published."""

    shows_epochs = False
    uid: ClassVar[str]

    @property
    def out(self) -> Path:
        return self.site.path / self.uid

    def leftovers(self) -> list[str]:
        staged = self.site.checkpoint.glob(f"wal/*/{self.uid}/staged/*")
        return [str(path) for path in staged]


class WalTarget(StagedTarget):
    """A folder per epoch, written anew when the epoch comes again."""

    uid = "wal"

    def sink(self) -> Any:
        out = self.out

        def write(frame: Any, epoch: int) -> None:
            frame.coalesce(1).write.mode("overwrite").parquet(str(out / f"{int(epoch):012d}"))

        return sinks.Wal(write, idempotent=True)

    def rows(self) -> list[Row]:
        files = sorted(self.out.glob("*/*.parquet"))
        return [_row(each) for file in files for each in pq.read_table(file).to_pylist()]


class ForeachTarget(StagedTarget):
    """Lines in a file; when an epoch comes again, its lines do."""

    uid = "foreach"
    may_repeat = True
    pieces = True

    def sink(self) -> Any:
        out = self.out

        def append(row: Any, epoch: int) -> None:
            # One write each: a driver that is killed leaves no half a line.
            handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(handle, (json.dumps(list(row)) + "\n").encode())
            os.close(handle)

        return sinks.Foreach(append)

    def rows(self) -> list[Row]:
        return [Row(*json.loads(line)) for line in self.out.read_text().splitlines()]


class RedisTarget(StagedTarget):
    uid = "redis"
    is_keyed = True
    pieces = True

    @property
    def prefix(self) -> str:
        return digest(self.site.folder.encode())[:8]

    def sink(self) -> Any:
        return sinks.Redis(self.site.redis, key=f"{self.prefix}:{{account}}", chunk_rows=3)

    def rows(self) -> list[Row]:
        import redis

        with redis.Redis.from_url(self.site.redis, decode_responses=True) as client:
            keys = list(client.scan_iter(f"{self.prefix}:*", count=1000))
            found = {key.partition(":")[2]: client.hgetall(key) for key in keys}
        numbers = [name for name in COLUMNS if name != "account"]
        return [
            _row({"account": account, **{name: int(fields[name]) for name in numbers}})
            for account, fields in found.items()
        ]


# Delta


class DeltaTarget(Target):
    def sink(self) -> Any:
        return sinks.Delta(str(self.out))

    @property
    def out(self) -> Path:
        return self.site.path / "delta"

    def _read(self, columns: list[str]) -> list[dict[str, Any]]:
        from deltalake import DeltaTable

        return DeltaTable(str(self.out)).to_pyarrow_table(columns=columns).to_pylist()

    def rows(self) -> list[Row]:
        return [_row(each) for each in self._read(list(COLUMNS))]

    def batches(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for each in self._read(["batch", "size"]):
            found[each["batch"]] = (each["size"], found.get(each["batch"], (0, 0))[1] + 1)
        return found

    def leftovers(self) -> list[str]:
        from deltalake import DeltaTable

        listed = {os.path.basename(uri) for uri in DeltaTable(str(self.out)).file_uris()}
        data = [str(path) for path in self.out.glob("part-*") if path.name not in listed]
        return data + [str(path) for path in self.out.glob("_cairn/*/*")]


class MergeTarget(DeltaTarget):
    is_keyed = True
    shows_epochs = False

    @property
    def out(self) -> Path:
        return self.site.path / "merge"

    def sink(self) -> Any:
        return sinks.Delta(str(self.out), mode="merge", key=("account",))

    def leftovers(self) -> list[str]:
        # What merging has replaced, or had written when it died, is for the table's VACUUM.
        return [str(path) for path in self.out.glob("_cairn/*/*")]


TARGETS: dict[str, type[Target]] = {
    "files": FilesTarget,
    "postgres": PostgresTarget,
    "upsert": PostgresUpsertTarget,
    "prepared": PostgresPreparedTarget,
    "delta": DeltaTarget,
    "merge": MergeTarget,
    "redis": RedisTarget,
    "wal": WalTarget,
    "foreach": ForeachTarget,
}


def targets(site: Site, names: list[str]) -> dict[str, Target]:
    return {name: TARGETS[name](site) for name in names}


def _row(found: dict[str, Any]) -> Row:
    return Row(*(found[name] for name in COLUMNS))


__all__ = ["COLUMNS", "OUT", "TARGETS", "Site", "Target", "new_site", "targets"]
