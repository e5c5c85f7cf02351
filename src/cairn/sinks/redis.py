"""Redis: a row is a hash or a string under its key, and the newest row of a key stays.

    sinks.Redis("redis://host:6379/0", key="account:{id}")            hash, a field per column
    sinks.Redis("env:REDIS_URL", key="limit:{id}", kind="string", value="amount", ttl="1 day")

Rows are staged as text (see `text_forms`). After the commit the driver sends them in chunks.
A chunk is a script that Redis runs atomically: it reads the fence of this job and sink, a small
hash {epoch, part, rows}, writes its rows only if they are the next ones, and moves the fence.

Always true here:
- an older epoch never overwrites a newer one, whichever driver sends it and however late;
- a chunk is applied once: a chunk that is sent again after a lost answer finds the fence moved;
- within an epoch the last row of a key stays, in order of batch, round, subtask and position;
- a reader sees whole chunks; an epoch of one chunk appears at once;
- rows that Redis loses later are not sent again, but the next commit logs a warning.

The fence and the keys must be on one server: a Redis Cluster is refused.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from cairn.crash import crash_point
from cairn.errors import CommitError, EpochError, PlanError
from cairn.logs import logger
from cairn.sinks.base import SinkContext
from cairn.sinks.staged import PublishedEpoch, Staged, StagedFile
from cairn.sinks.text_forms import json_of, text_of
from cairn.storage.environment import read_setting
from cairn.types.durations import Duration, duration_ms

CHUNK_ROWS: Final = 1000
CHUNK_BYTES_MAX: Final = 8 << 20
CONNECT_TIMEOUT_S: Final = 5
ANSWER_TIMEOUT_S: Final = 30
RESTARTS_MAX: Final = 100

_KEY: Final = "key"
_FIELD: Final = "field:"
_VALUE: Final = "value"

# KEYS: the fence, then a key per row. ARGV: epoch, batch, first row, ttl in ms or 0, number of
# fields of a hash or 0 for strings, a 0 or 1 per value (1: null) or nothing without nulls, names
# of fields, values. Returns the number of rows of the batch in Redis, or -1 if it has a newer one.
_SCRIPT: Final = """
local fence = redis.call('HMGET', KEYS[1], 'epoch', 'part', 'rows')
local at_epoch, at_batch = tonumber(fence[1] or '-1'), tonumber(fence[2] or '-1')
local epoch, batch, first = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if at_epoch > epoch or (at_epoch == epoch and at_batch > batch) then return -1 end
local rows = 0
if at_epoch == epoch and at_batch == batch then rows = tonumber(fence[3]) end
if rows ~= first then return rows end
local ttl, fields, nulls = ARGV[4], tonumber(ARGV[5]), ARGV[6]
local has_nulls = #nulls > 0
local at, values = 6 + fields, fields > 0 and fields or 1
local function check(answer, key)
  if type(answer) == 'table' and answer.err then
    return redis.error_reply(answer.err .. ' (key ' .. key .. ')')
  end
end
for i = 2, #KEYS do
  local key, put, drop = KEYS[i], {}, {}
  for j = 1, values do
    local is_null = has_nulls and string.byte(nulls, (i - 2) * values + j) == 49
    if fields == 0 then
      if is_null then drop[1] = true else put[1] = ARGV[at + j] end
    elseif is_null then
      drop[#drop + 1] = ARGV[6 + j]
    else
      put[#put + 1] = ARGV[6 + j]
      put[#put + 1] = ARGV[at + j]
    end
  end
  at = at + values
  local failed
  if fields == 0 then
    if #drop > 0 then failed = check(redis.pcall('DEL', key), key)
    elseif ttl == '0' then failed = check(redis.pcall('SET', key, put[1]), key)
    else failed = check(redis.pcall('SET', key, put[1], 'PX', ttl), key) end
  else
    if #drop > 0 then failed = check(redis.pcall('HDEL', key, unpack(drop)), key) end
    if not failed and #put > 0 then failed = check(redis.pcall('HSET', key, unpack(put)), key) end
    if not failed and ttl ~= '0' then failed = check(redis.pcall('PEXPIRE', key, ttl), key) end
  end
  if failed then return failed end
end
rows = first + #KEYS - 1
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'part', ARGV[2], 'rows', rows)
return rows
"""


class Redis(Staged):
    """Upserts into Redis, fenced by epoch: `key="account:{id}"` names the key of a row.

    `kind="hash"` has a field for each column in `value`, by default each that is not part of the
    key; a null removes its field, and fields of other names stay. `kind="string"` stores the text
    of the column `value`, where null removes the key, or without `value` the whole row as JSON.
    `ttl` counts from the publication. `url` may be `env:NAME`, read in the driver.
    """

    shows = "pieces"
    driver_only = frozenset({"_client", "_url", "_left"})

    _client: Any = None
    _left: tuple[int, int, int]
    """Epoch, batch and rows of the fence after this driver's last publication."""

    def __init__(
        self,
        url: str,
        *,
        key: str,
        kind: Literal["hash", "string"] = "hash",
        value: str | Sequence[str] | None = None,
        ttl: Duration | None = None,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        self._url = url
        self.key = key
        self.key_parts = _parse_template(key)
        if kind not in ("hash", "string"):
            raise PlanError(f"unknown kind {kind!r} of Redis values\n  expected: hash or string")
        self.kind = kind
        self.value = (value,) if isinstance(value, str) else tuple(value or ())
        if kind == "string" and len(self.value) > 1:
            raise PlanError(
                f"a string in Redis has one value\n  found: {', '.join(self.value)}\n"
                "  next: name one column, or none for the whole row as JSON, or use kind='hash'"
            )
        self.ttl_ms = 0 if ttl is None else duration_ms(ttl, "ttl")
        if chunk_rows < 1:
            raise PlanError(f"chunk_rows must be at least 1, not {chunk_rows}")
        self.chunk_rows = chunk_rows

    def __repr__(self) -> str:
        return f"Redis(key={self.key!r}, kind={self.kind!r})"

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self._left = (-1, -1, 0)
        names = [column for _, column in self.key_parts if column]
        for name in (*names, *self.value):
            if name not in context.schema.names:
                raise PlanError(
                    f"sink {context.uid!r}: the rows do not have column {name!r}\n"
                    f"  expected: one of {', '.join(context.schema.names)}",
                    sink=context.uid,
                )
        others = tuple(name for name in context.schema.names if name not in names)
        self._columns = self.value or others
        if self.kind == "hash" and not self._columns:
            raise PlanError(
                f"sink {context.uid!r}: every column is part of the key, so a hash has no field\n"
                "  next: name fields with value=, or use kind='string'",
                sink=context.uid,
            )
        if context.scratch is None:
            self._connect()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    @property
    def target(self) -> str:
        at = self._client.connection_pool.connection_kwargs
        place = at.get("path") or f"{at.get('host')}:{at.get('port')}"
        return f"database {at.get('db', 0)} of the Redis server at {place}"

    # In a slot

    def encode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = {_KEY: self._keys(batch)}
        if self.kind == "hash":
            columns |= {_FIELD + name: text_of(batch[name]) for name in self._columns}
        else:
            columns[_VALUE] = text_of(batch[self.value[0]]) if self.value else json_of(batch)
        return pa.record_batch(columns)

    def _keys(self, batch: pa.RecordBatch) -> pa.Array:
        texts: list[Any] = []
        for literal, column in self.key_parts:
            if literal:
                texts.append(pa.scalar(literal.encode(), pa.binary()))
            if column:
                if batch[column].null_count:
                    row = batch.filter(pc.is_null(batch[column])).slice(0, 1).to_pylist()[0]
                    raise EpochError(
                        f"sink {self.context.uid!r}: column {column!r} is part of the key "
                        f"and null\n  row: {row}\n"
                        "  next: filter such rows out before the sink, or give them a value",
                        sink=self.context.uid,
                        column=column,
                    )
                texts.append(text_of(batch[column]))
        empty = pa.scalar(b"", pa.binary())
        return texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, empty)

    # In the driver

    @property
    def fence(self) -> str:
        """The key of the hash with the position of this job and sink."""
        return f"cairn:{self.context.job_id}:{self.context.uid}"

    def _connect(self) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise PlanError(
                "sinks.Redis needs the redis package\n  next: pip install 'cairn-state[redis]'"
            ) from None
        try:
            self._client = redis.Redis.from_url(
                read_setting(self._url, f"the url of sink {self.context.uid!r}"),
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                socket_timeout=ANSWER_TIMEOUT_S,
                # Once, for a connection that broke while idle. The caller handles the rest.
                retry=Retry(NoBackoff(), 1),
                client_name=f"cairn:{self.context.uid}",
            )
            is_cluster = self._client.info("cluster").get("cluster_enabled")
        except redis.AuthenticationError:
            raise PlanError(
                f"sink {self.context.uid!r}: Redis refuses the password\n"
                "  next: put the password of the server into the url"
            ) from None
        except (redis.ConnectionError, redis.TimeoutError):
            return  # Unreachable now. The first commit waits for it and reports that.
        except (redis.RedisError, ValueError) as error:
            # The cause of a ValueError may quote the url.
            what = str(error) if isinstance(error, redis.RedisError) else "the url is not valid"
            raise PlanError(
                f"sink {self.context.uid!r}: cannot use Redis: {what}\n"
                "  expected: redis://host:port/db, rediss://… or unix://path"
            ) from None
        if is_cluster:
            raise PlanError(
                f"sink {self.context.uid!r}: this server is part of a Redis Cluster\n"
                "  expected: one server, as the fence moves in one step with all keys\n"
                "  next: use a single server or a primary with replicas"
            )

    def newest_mark(self) -> int | None:
        import redis

        marks = [super().newest_mark()]
        with suppress(redis.RedisError):
            # If Redis is unreachable, the first commit reads the fence.
            fence = self._client.hget(self.fence, "epoch")
            marks.append(None if fence is None else int(fence))
        return max((mark for mark in marks if mark is not None), default=None)

    def publish(self, epoch: PublishedEpoch, files: Sequence[StagedFile]) -> None:
        import redis

        try:
            self._publish(epoch, files)
            self._left = int(epoch), epoch.batch, sum(file.rows for file in files)
        except redis.RedisError as error:
            raise CommitError(
                f"sink {self.context.uid!r}: Redis did not accept all of epoch {epoch}\n"
                f"  cause: {type(error).__name__}: {error}",
                sink=self.context.uid,
                epoch=int(epoch),
            ) from None

    def _publish(self, epoch: PublishedEpoch, files: Sequence[StagedFile]) -> None:
        script = self._client.register_script(_SCRIPT)
        done = self._count_done(epoch)
        for _ in range(RESTARTS_MAX):
            for first, keys, names, columns in self._chunks(files, done):
                nulls, values = _flat(columns)
                args = [int(epoch), epoch.batch, first, self.ttl_ms, len(names), nulls]
                done = script([self.fence, *keys], [*args, *names, *values])
                crash_point("driver.sink.piece")
                if done != first + len(keys):
                    break
            else:
                return
            if done == -1:
                raise self._overtaken_error(epoch)
        raise CommitError(
            f"sink {self.context.uid!r}: epoch {epoch} was started {RESTARTS_MAX} times\n"
            f"  found: the fence {self.fence} is not where this driver has put it\n"
            "  next: check that Redis does not lose writes, and that only one driver runs the job",
            sink=self.context.uid,
        )

    def _overtaken_error(self, epoch: PublishedEpoch) -> CommitError:
        """Return the error for a newer epoch in Redis without a mark of this one."""
        found = int(self._client.hget(self.fence, "epoch") or -1)
        return CommitError(
            f"sink {self.context.uid!r}: Redis has a newer epoch of this job than {epoch}, which "
            "is not marked as published\n"
            f"  found: the fence {self.fence} at epoch {found}\n"
            "  next: if another driver runs the job, leave it to that one; else the checkpoint is "
            "an older copy: restore the newest one, or `cairn branch` this one",
            sink=self.context.uid,
            epoch=int(epoch),
        )

    def _count_done(self, epoch: PublishedEpoch) -> int:
        """Return the number of rows of this batch that Redis has."""
        found = self._client.hmget(self.fence, "epoch", "part", "rows")
        at = (-1, -1, 0) if None in found else tuple(map(int, found))
        expected = max((*self.marked, 0), self._left)
        if at < expected:
            logger.warning(
                "sink %r: Redis has lost rows that were published\n  found: the fence %s at %s\n"
                "  expected: %s\n  next: find the cause, for example a failover; "
                "to publish them again, to every sink, roll the job back (cairn rollback)",
                self.context.uid,
                self.fence,
                _place(at),
                _place(expected),
            )
        if at[:2] > (int(epoch), epoch.batch):
            raise self._overtaken_error(epoch)
        return at[2] if at[:2] == (int(epoch), epoch.batch) else 0

    def _chunks(
        self, files: Sequence[StagedFile], skip: int
    ) -> Iterator[tuple[int, list[bytes], list[str], list[pa.Array]]]:
        """Yield (first row number, keys, field names, columns of values) after `skip` rows."""
        first = 0
        for file in files:
            if first + file.rows <= skip:
                first += file.rows
                continue
            for batch in self.batches(file):
                start = min(max(skip - first, 0), batch.num_rows)
                while start < batch.num_rows:
                    chunk = self._shrink(batch.slice(start, self.chunk_rows))
                    names = [
                        name.removeprefix(_FIELD)
                        for name in chunk.schema.names
                        if name.startswith(_FIELD)
                    ]
                    yield first + start, chunk[_KEY].to_pylist(), names, chunk.columns[1:]
                    start += chunk.num_rows
                first += batch.num_rows

    def _shrink(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        """Return the first rows of a chunk that is too large for one command."""
        while chunk.num_rows > 1 and _bytes(chunk) > CHUNK_BYTES_MAX:
            chunk = chunk.slice(0, chunk.num_rows // 2)
        return chunk


def _place(fence: tuple[int, ...]) -> str:
    epoch, batch, rows = fence
    return "no epoch" if epoch < 0 else f"epoch {epoch}, batch {batch}, row {rows}"


def _bytes(chunk: pa.RecordBatch) -> int:
    return sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in chunk.columns)


def _flat(columns: Sequence[pa.Array]) -> tuple[str, list[bytes]]:
    """Return a mark per value (1: null), or "" without nulls, and the values row by row."""
    lists = [column.to_pylist() for column in columns]
    values = lists[0] if len(lists) == 1 else [v for row in zip(*lists, strict=True) for v in row]
    if not any(column.null_count for column in columns):
        return "", values
    nulls = "".join("1" if value is None else "0" for value in values)
    return nulls, [b"" if value is None else value for value in values]


def _parse_template(template: str) -> list[tuple[str, str | None]]:
    """Return [(text, column)…] of a template like `account:{id}`."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise _bad_key(template, str(error)) from None
    if any(form or conversion for _, _, form, conversion in parts):
        raise _bad_key(template, "a column has no format")
    if any(column == "" for _, column, _, _ in parts):
        raise _bad_key(template, "a column has no name")
    if not any(column for _, column, _, _ in parts):
        raise _bad_key(template, "without a column all rows would have one key")
    return [(text, column) for text, column, _, _ in parts]


def _bad_key(template: str, why: str) -> PlanError:
    return PlanError(
        f"the key {template!r} cannot be used: {why}\n"
        "  expected: text with columns in braces, as in 'account:{id}'; a brace is {{ or }}"
    )
