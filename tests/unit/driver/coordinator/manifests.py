"""Short ways to write down manifests and their parts."""

from __future__ import annotations

from typing import Any

from cairn.storage.manifest import (
    EMPTY_VERSION,
    Epoch,
    EpochOperator,
    FileRef,
    RangeState,
    SparkPosition,
    StateDecl,
)


def ref(name: str, groups: range, **more: Any) -> FileRef:
    facts: dict[str, Any] = {
        "id": name,
        "path": f"state/{name}",
        "offset": 0,
        "length": 100,
        "kind": "delta",
        "tier": 0,
        "rows": 10,
        "first_epoch": 1,
        "last_epoch": 1,
        "first_group": groups.start,
        "group_count": len(groups),
    }
    return FileRef(**{**facts, **more})


def part(
    groups: range, *files: FileRef, version: str | None = None, keys: int = 0, size: int = 0
) -> RangeState:
    return RangeState(
        first_group=groups.start,
        group_count=len(groups),
        version=version or (f"v{groups}" if files else EMPTY_VERSION),
        files=list(files),
        state_keys=keys,
        state_entries=keys,
        state_bytes=size,
    )


def entry(
    *parts: RangeState,
    uid: str = "op",
    keys: dict[str, str] | None = None,
    states: dict[str, StateDecl] | None = None,
) -> EpochOperator:
    return EpochOperator(
        uid=uid,
        function_version="f",
        key_types=keys or {"k": "bigint"},
        states=states or {},
        parallelism=len(parts),
        ranges=list(parts),
    )


def epoch(
    number: int = 5,
    *entries: EpochOperator,
    folder: str = "spark/000000000001",
    batch_id: int = 3,
    offsets: str = "",
) -> Epoch:
    return Epoch(
        number=number,
        parent=None,
        term=1,
        nonce="n",
        wall_ms=0,
        now_ms=0,
        watermarks={},
        spark=SparkPosition(folder=folder, batch_id=batch_id, offsets=offsets),
        operators={each.uid: each for each in entries},
    )
