"""How much of the state does a RocksDB base upload when 1 % of the keys have changed?

Every key is loaded and a base awaited. Then, again and again: 1 % of the keys change in one
epoch, and epochs of one row follow until each subtask has announced a base that has the change.
Counted are the bytes of all objects that bases list for the first time since the round before,
against the full size of the base. CAIRN_BASE_RATIO is so small that every epoch is worth a base.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harness import (
    Epochs,
    Feed,
    bases_of,
    file_stream,
    in_fresh_process,
    note,
    report,
    work_dir,
)
from keyed_count import counting_job

import cairn
from cairn import sinks
from cairn.storage.manifest import Epoch

BASE_RATIO = "1e-6"
TICKS_MAX = 60


class Uploaded:
    """The objects of bases seen so far, and the bytes of new ones."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._known: set[str] = set()
        self.bytes = 0

    def see(self, epoch: Epoch) -> None:
        for ref in bases_of(epoch).values():
            for path in [ref.path, *ref.objects]:
                if path not in self._known:
                    self._known.add(path)
                    self.bytes += (self._checkpoint / path).stat().st_size


def full_size(epoch: Epoch) -> int:
    return sum(ref.size for ref in bases_of(epoch).values())


def has_base_of(epoch: Epoch, number: int) -> bool:
    """Has every subtask announced a base that has epoch `number` in it?"""
    parts = [part for entry in epoch.operators.values() for part in entry.ranges]
    return all(
        any(ref.kind == "base" and ref.last_epoch >= number for ref in part.files) for part in parts
    )


def measure(task: dict[str, Any]) -> list[dict[str, Any]]:
    keys, changed = task["keys"], max(1, task["keys"] // 100)
    spark = cairn.session("bench", master="local[2]", driver__memory="4g", ui__enabled=False)
    rounds = []
    with work_dir() as work:
        feed = Feed(work / "input")
        feed.put_all_keys(keys)
        preload = feed.files
        job = counting_job(file_stream(spark, feed.folder), sinks.Noop())
        with job.start(
            checkpoint=str(work / "checkpoint"),
            parallelism=2,
            backend=task["backend"],
            trigger="0 seconds",
            # Removing what is retired must not overtake the look at it.
            retained_epochs=50,
        ) as run:
            epochs = Epochs(run, work / "checkpoint")
            uploaded = Uploaded(work / "checkpoint")

            def settle(number: int) -> Epoch:
                for _ in range(TICKS_MAX):
                    feed.put_some_keys(keys, 1)
                    epoch = epochs.next()[1]
                    uploaded.see(epoch)
                    if has_base_of(epoch, number):
                        return epoch
                raise SystemExit(
                    f"no base of epoch {number} in {TICKS_MAX} epochs after it\n"
                    f"  CAIRN_BASE_RATIO={BASE_RATIO} should make every epoch worth one"
                )

            settle(epochs.take(preload)[-1][1].number)
            for _ in range(task["rounds"]):
                uploaded.bytes = 0
                feed.put_some_keys(keys, changed)
                epoch = epochs.next()[1]
                uploaded.see(epoch)
                epoch = settle(epoch.number)
                rounds.append({"uploaded_bytes": uploaded.bytes, "full_bytes": full_size(epoch)})
                note(str(rounds[-1]))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--backend", default="rocksdb")
    parser.add_argument("--quick", action="store_true", help="a trial; the result is not kept")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(json.dumps(measure(options.task)))
        return
    if options.quick:
        options.keys, options.rounds = 100_000, 3
    task = {name: getattr(options, name) for name in ("keys", "rounds", "backend")}
    rounds = in_fresh_process(task, CAIRN_BASE_RATIO=BASE_RATIO)
    ratios = [r["uploaded_bytes"] / r["full_bytes"] for r in rounds]
    report(
        "incremental",
        {
            "uploaded_of_full": {
                "mean": round(sum(ratios) / len(ratios), 4),
                "max": round(max(ratios), 4),
            },
            "required": {"uploaded_of_full": 0.10},
            "keys": options.keys,
            "changed_keys_per_base": max(1, options.keys // 100),
            "backend": options.backend,
            "rounds": rounds,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
