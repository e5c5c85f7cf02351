"""Where sinks publish, as the outside world sees it: one `Place` per kind of sink.

The contract suite and the simulations run over all of them. A new sink adds a module with
its places, and their names here.
"""

from tests.places.base import SCHEMA, Place, batch, context
from tests.places.delta import DeltaPlace, MergedDeltaPlace, PartitionedDeltaPlace
from tests.places.driver import CollectPlace
from tests.places.files import FilesPlace, OneRowFilesPlace

PLACES: dict[str, type[Place]] = {
    "files": FilesPlace,
    "files, one a row": OneRowFilesPlace,
    "collect": CollectPlace,
    "delta": DeltaPlace,
    "delta, partitioned": PartitionedDeltaPlace,
    "delta, merged": MergedDeltaPlace,
}

__all__ = ["PLACES", "SCHEMA", "Place", "batch", "context"]
