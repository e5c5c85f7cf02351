"""The memory that slots may use, beside the JVM of an executor.

On YARN and Kubernetes a container has the executor's heap and `spark.executor.memoryOverhead`.
Slots live in the overhead, and the kernel kills a process of a container that outgrows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from cairn.errors import PlanError

SLOT_MEMORY_MB_MIN: Final = 64
_UNITS_MB: Final = {"b": 1 / 1024**2, "k": 1 / 1024, "": 1, "m": 1, "g": 1024, "t": 1024**2}
_OVERHEAD_MB_MIN: Final = 384
_CAP: Final = "spark.executor.pyspark.memory"


class Budget(NamedTuple):
    """Memory of one slot, and the slots that run beside one executor at a time."""

    slot_mb: int
    slots: int
    jvm_mb: int = 0
    """Memory of the JVM of Hadoop's client, which the slots share."""

    @property
    def text(self) -> str:
        total = self.slot_mb * self.slots + self.jvm_mb
        jvm = f", and Hadoop's client {self.jvm_mb:,} MiB" if self.jvm_mb else ""
        return f"slots may use {self.slot_mb:,} MiB each{jvm}: {total:,} MiB beside an executor"


def find_budget(
    given_mb: int | None, conf: Mapping[str, str], *, parallelism: int, jvm_mb: int = 0
) -> Budget | None:
    """Return the memory of slots; None: no limit is known. `jvm_mb` is not for slots.

    PlanError if Spark's settings would make allocations of slots fail.
    """
    cap_mb = parse_mb(conf.get(_CAP, "0"))
    if cap_mb:
        raise PlanError(
            f"{_CAP} is {conf[_CAP]}: slots inherit this limit of address space from Spark's "
            "Python workers, and fail when their state reaches it\n"
            f"  next: unset {_CAP}, give the memory to spark.executor.memoryOverhead, and pass "
            "slot_memory_mb",
            setting=_CAP,
        )
    if given_mb is not None and given_mb < SLOT_MEMORY_MB_MIN:
        raise PlanError(f"slot_memory_mb must be at least {SLOT_MEMORY_MB_MIN}, found {given_mb}")
    master = conf.get("spark.master", "local")
    if master.startswith("local"):
        return None if given_mb is None else Budget(given_mb, parallelism, jvm_mb)
    cores = int(conf.get("spark.executor.cores", "1"))
    slots = max(1, min(parallelism, cores // int(conf.get("spark.task.cpus", "1"))))
    if given_mb is not None:
        return Budget(given_mb, slots, jvm_mb)
    if not master.startswith(("yarn", "k8s")):
        return None  # A standalone worker does not limit the memory of its processes.
    return Budget(max(1, (overhead_mb(conf) - jvm_mb) // slots), slots, jvm_mb)


def overhead_mb(conf: Mapping[str, str]) -> int:
    """Return the memory of an executor beside its heap, as Spark computes it."""
    given = conf.get("spark.executor.memoryOverhead")
    if given is not None:
        return math.floor(parse_mb(given))
    heap_mb = parse_mb(conf.get("spark.executor.memory", "1g"))
    share = float(conf.get("spark.executor.memoryOverheadFactor", "0.1"))
    return max(_OVERHEAD_MB_MIN, math.floor(heap_mb * share))


def parse_mb(text: str) -> float:
    """Return a size of Spark's settings in MiB; without a unit it is MiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([bkmgt]?)b?\s*", text.lower())
    if found is None:
        return 0.0  # Spark itself refuses it.
    return float(found[1]) * _UNITS_MB[found[2]]
