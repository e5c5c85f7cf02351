"""Short ways to write down Spark's folder."""

from __future__ import annotations

import json

import msgspec

from cairn.storage.manifest import Epoch
from cairn.storage.seen_files import DEFAULT_INTERVAL
from cairn.storage.store import Store
from tests.unit.driver.coordinator.manifests import epoch

OLD = "spark/000000000001"
NEW = "spark/000000000009"


def offsets(*lines: str, clock: int = 0) -> str:
    return "\n".join(["v1", json.dumps({"batchTimestampMs": clock, "conf": {}}), *lines])


def at(batch_id: int, *lines: str, sources: str = "") -> Epoch:
    """An epoch of that batch; `sources` are names with spaces between them."""
    made = epoch(5, folder=OLD, batch_id=batch_id, offsets=offsets(*lines))
    spark = msgspec.structs.replace(made.spark, sources=sources.split())
    return msgspec.structs.replace(made, spark=spark)


def spark_ran(store: Store, batches: int, *, committed: int, line: str = '{{"n":{0}}}') -> None:
    """Spark's folder after so many batches, of which the first few are committed."""
    store.put(f"{OLD}/metadata", b'{"id":"q"}')
    for batch in range(batches):
        store.put(f"{OLD}/offsets/{batch}", offsets(line.format(batch), clock=batch).encode())
    for batch in range(committed):
        store.put(f"{OLD}/commits/{batch}", b'v1\n{"nextBatchWatermarkMs":0}')


def paths(store: Store, folder: str) -> list[str]:
    return [found.path[len(folder) + 1 :] for found in store.list(folder)]


def log_line(batch: int) -> str:
    return json.dumps({"path": f"file:///in/{batch}", "timestamp": 1, "batchId": batch})


def file_log(
    store: Store,
    last: int,
    *,
    keep_from: int = 0,
    index: int = 0,
    interval: int = DEFAULT_INTERVAL,
    folder: str = OLD,
    first: int = 0,
) -> None:
    """What Spark has in sources/<index> after entry `last`; older entries are cleaned up."""
    for entry in range(max(first, keep_from), last + 1):
        if (entry + 1) % interval == 0:
            lines = [log_line(each) for each in range(entry + 1)]
            name, text = f"{entry}.compact", "\n".join(["v1", *lines])
        else:
            name, text = str(entry), f"v1\n{log_line(entry)}"
        store.put(f"{folder}/sources/{index}/{name}", text.encode())


def spark_interval(setting: int, compacts: list[int]) -> int:
    """The interval that Spark goes on with, as its CompactibleFileStreamLog derives it."""
    if not compacts:
        return setting
    latest, *others = sorted(compacts, reverse=True)
    if others:
        return latest - others[0]
    count = latest + 1
    if count <= setting or setting >= count // 2:
        return count
    return next(n for n in [*range(setting, count // 2 + 1), count] if count % n == 0)


def files_seen(
    store: Store, index: int = 0, *, setting: int = DEFAULT_INTERVAL, folder: str = NEW
) -> list[int]:
    """The entries that a new query of Spark's takes for read, with this setting."""
    names = paths(store, f"{folder}/sources/{index}")
    latest = max(int(name.split(".")[0]) for name in names)
    compacts = [int(name.split(".")[0]) for name in names if name.endswith(".compact")]
    interval = spark_interval(setting, compacts)
    seen = []
    for number in range(max(0, (latest + 1) // interval * interval - 1), latest + 1):
        name = f"{number}.compact" if (number + 1) % interval == 0 else str(number)
        head, *lines = store.get(f"{folder}/sources/{index}/{name}").decode().split("\n")
        assert head == "v1"
        seen += [json.loads(text)["batchId"] for text in lines if text]
    return sorted(seen)
