"""A slot keeps freed memory for the next batch, and returns it on request."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading
import psutil, pyarrow as pa
from cairn.slot.memory import keep_memory, trim_memory

def resident():
    return psutil.Process().memory_info().rss >> 20

def work():
    # The last one keeps the others from being the end of the heap.
    held = [pa.nulls(4 << 20, pa.int64()) for _ in range(4)] + [pa.array(range(100_000))]
    used = resident()
    del held[:-1]
    freed = resident()
    trim_memory()
    print(used, freed, resident())

keep_memory()
worker = threading.Thread(target=work)
worker.start()
worker.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other allocators have no such setting")
def test_freed_memory_is_kept_until_it_is_trimmed() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    used, freed, trimmed = map(int, found.stdout.split())
    assert freed > used - 32, found
    assert trimmed < used - 96, found
