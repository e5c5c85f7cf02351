"""Rows of joins whose content is in files, mapped to memory, if it does not fit.

Keys, times and flags of the rows are in memory: some 50 bytes a row, by which rows are found. Pages
of content never change, so each is written to a file once; the operating system reads what is used
and drops it when memory is short.

Always true here:
- a file has no name once it is mapped: it is gone with the last page that uses it;
- the content in memory is bounded by the table's limit, plus small pages and the running epoch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from cairn.backends.columnar.row_table import RowTable
from cairn.backends.contract import Backend
from cairn.state import Declaration

if TYPE_CHECKING:
    from cairn.backends.cached.backend import CachedBackend

PAGE_BYTES_MIN = 1 << 20
"""Smaller pages stay in memory: they are joined with others soon."""


class MappedRowTable(RowTable):
    """Timed rows: in memory as far as it goes, then in files."""

    backend: CachedBackend

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        super().__init__(declaration, key_type, backend, group_count)
        self.backend.run_tables.add(self.name)

    def _clear(self) -> None:
        super()._clear()
        self._mapped: list[pa.StructArray] = []
        """Pages that are in files."""
        self._loaded_bytes = 0

    def promote(self) -> None:
        super().promote()
        self._map_pages()

    def apply(self, batch: pa.RecordBatch) -> None:
        self._loaded_bytes += batch.nbytes
        if self._loaded_bytes > self.backend.table_bytes_max:
            (batch,) = write_mapped([batch], self.backend.new_folder("rows"))
        super().apply(batch)

    def _load(self, batch: pa.RecordBatch) -> None:
        super()._load(batch)
        self._loaded_bytes = 0
        self._map_pages()

    def _map_pages(self) -> None:
        """Move content to a file if there is too much of it in memory."""
        known = {id(page) for page in self._mapped}
        self._mapped, held = [], []
        for run in self._runs:
            arrays = run.all.pages.arrays
            self._mapped += [page for page in arrays if id(page) in known]
            held += [(arrays, at) for at, page in enumerate(arrays) if id(page) not in known]
        sizes = [arrays[at].nbytes for arrays, at in held]
        if sum(sizes) <= self.backend.table_bytes_max:
            return
        large = [place for place, size in zip(held, sizes, strict=True) if size >= PAGE_BYTES_MIN]
        if not large:
            return
        batches = [pa.RecordBatch.from_arrays([arrays[at]], ["row"]) for arrays, at in large]
        mapped = write_mapped(batches, self.backend.new_folder("rows"))
        for (arrays, at), batch in zip(large, mapped, strict=True):
            arrays[at] = batch.column(0)
            self._mapped.append(arrays[at])


def write_mapped(batches: Sequence[pa.RecordBatch], path: str) -> list[pa.RecordBatch]:
    """Return the same rows in a file that is mapped to memory."""
    try:
        with (
            pa.OSFile(path, "wb") as sink,
            pa.ipc.new_file(sink, batches[0].schema) as writer,
        ):
            for batch in batches:
                writer.write_batch(batch)
        # The mapping outlives the file that is closed here.
        with pa.memory_map(path) as source:
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    finally:
        if os.path.exists(path):
            os.unlink(path)
