"""The places that sinks publish to, seen from outside: one `Place` per kind of sink.

The contract suite and the simulations run over all of them. A new sink adds a module with
its places, and their names here.
"""

from tests.places.base import SCHEMA, Place, batch, context
from tests.places.delta import DeltaPlace, MergedDeltaPlace, PartitionedDeltaPlace
from tests.places.driver import CollectPlace
from tests.places.files import (
    BucketFilesPlace,
    CompactedFilesPlace,
    FilesPlace,
    JsonFilesPlace,
    ListedFilesPlace,
    OneRowFilesPlace,
    RenamingFilesPlace,
)
from tests.places.postgres import PostgresPlace, PostgresPreparedPlace, PostgresUpsertPlace
from tests.places.redis import RedisHashPlace, RedisStringPlace
from tests.places.wal import ForeachBatchPlace, ForeachPlace, WalPlace

PLACES: dict[str, type[Place]] = {
    "files": FilesPlace,
    "files, one a row": OneRowFilesPlace,
    "files, json by key": JsonFilesPlace,
    "files, listed": ListedFilesPlace,
    "files, compacted": CompactedFilesPlace,
    "files, in a bucket": BucketFilesPlace,
    "files, hdfs-like": RenamingFilesPlace,
    "collect": CollectPlace,
    "postgres": PostgresPlace,
    "postgres, upsert": PostgresUpsertPlace,
    "postgres, prepared": PostgresPreparedPlace,
    "wal": WalPlace,
    "foreach": ForeachPlace,
    "foreach, all at once": ForeachBatchPlace,
    "redis hash": RedisHashPlace,
    "redis string": RedisStringPlace,
    "delta": DeltaPlace,
    "delta, partitioned": PartitionedDeltaPlace,
    "delta, merged": MergedDeltaPlace,
}

__all__ = ["PLACES", "SCHEMA", "Place", "batch", "context"]
