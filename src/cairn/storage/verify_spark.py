"""Check Spark's own streaming checkpoint against the epochs: offsets, commits, sources.

A start compares the same files and lays out Spark's folder again if it finds a difference
(`driver/coordinator/rewind`). So damage here loses no rows; it shows that something other than
Spark has changed the files.

Always true here:
- a job may run meanwhile: batches after the newest epoch are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cairn.errors import CairnError
from cairn.storage.manifest import Epoch, SparkPosition
from cairn.storage.source_logs import find_differing_file, source_files
from cairn.storage.spark_log import check_file, names_query, read_metadata, same_offsets
from cairn.storage.store import NotFoundError, Store

_HEALED = "the next start lays it out again"
_ATTEMPTS = 3


def check_spark(
    store: Store, checkpoint: Store, epochs: Sequence[Epoch], newest: Epoch
) -> Iterator[tuple[str, str]]:
    """Yield (path, what is wrong) for Spark's folder of the newest epoch, in `store`.

    `epochs` are those in the log of `checkpoint`.
    """
    position = newest.spark
    folder = position.folder
    if not folder or not position.offsets or not store.list(folder):
        return  # Nothing was read yet, or Spark's folder is elsewhere or was removed.
    texts: dict[str, str] = {}
    for found in (*store.list(f"{folder}/offsets"), *store.list(f"{folder}/commits")):
        try:
            texts[found.path] = check_file(store, found.path, store.get(found.path))
        except NotFoundError:
            continue  # Spark has cleaned it up since it was listed.
        except CairnError as error:
            yield found.path, f"{error.message}\n  {_HEALED}"
            texts[found.path] = ""
    for epoch in epochs:
        path = f"{folder}/offsets/{epoch.spark.batch_id}"
        text = texts.get(path)
        if epoch.spark.folder == folder and text and not same_offsets(text, epoch.spark.offsets):
            yield path, f"its offsets are not those of epoch {epoch.number}; {_HEALED}"
    if f"{folder}/offsets/{position.batch_id}" not in texts:
        path = f"{folder}/offsets/{position.batch_id}"
        yield path, f"the file is missing; epoch {newest.number} was made from it; {_HEALED}"
    if not names_query(read_metadata(store, folder)):
        yield f"{folder}/metadata", f"it does not name Spark's query; {_HEALED}"
    yield from _check_sources(store, checkpoint, position)


def _check_sources(
    store: Store, checkpoint: Store, position: SparkPosition
) -> Iterator[tuple[str, str]]:
    try:
        for _ in range(_ATTEMPTS):
            path = find_differing_file(store, position, checkpoint=checkpoint, is_running=True)
            if path is None:
                break
        else:
            assert path is not None
            yield path, f"it is not what the newest epoch was made from; {_HEALED}"
        # If the epoch keeps no lists, the folder is the only copy.
        source_files(store, position, checkpoint=checkpoint)
    except CairnError as error:
        yield str(error.facts.get("file", position.folder)), error.message
