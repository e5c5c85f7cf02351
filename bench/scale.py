"""How much work has the driver per epoch with 1,000 subtasks, compared with 100?

The real coordinator, log and manifests, without Spark: slots are played by functions that
acknowledge files of real sizes, the store keeps manifests in memory and of other files the names
(`scale_slots.py`). Ten operators, each behind a shuffle, 32,768 key groups, 10 TB of state of which
an epoch changes a ten-thousandth. Each size runs in a process of its own.

    begin      from the start of an epoch until Spark could run: versions, orders of compactions
    read       decode acknowledgements and reports of all subtasks
    pack       check them, write small deltas into one object
    manifest   make the record of the epoch, encode and put it
    collect    delete what no kept epoch needs

Times are CPU seconds of the driver's thread; `epoch_with_store_ms` adds the driver's requests, one
after another, as an object store would answer them: 30 ms each, and 100 MB/s. A restart opens the
log, takes over and reads the newest epoch; after its first epoch it also lists and counts all
files. The restart is also measured after `--age` epochs of a job with one subtask, against the same
job when it was young.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from typing import Any

import numpy as np
import psutil
from harness import SEED, in_fresh_process, note, report
from scale_slots import SizesStore, Slots, chain_graph

from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.quiet_collector import pause_collector
from cairn.driver.coordinator.rounds import Outcome
from cairn.plan.deploy import job_spec
from cairn.protocol.messages import Begin, ack_decoder, begin_encoder, report_decoder
from cairn.protocol.parts import read_part
from cairn.sinks import Noop
from cairn.storage.log import create_or_open_job
from cairn.storage.manifest import FULL_EVERY, SparkPosition
from cairn.storage.paths import LOG_FOLDER
from cairn.testing import call_at_points

OPERATORS = 10
GROUP_COUNT = 32_768
STATE_BYTES = 10 * 1000**4
RETAINED_EPOCHS = 20
SIZES, LARGEST = (10, 100, 1000), 5000
REQUEST_S, STORE_BYTES_PER_S = 0.03, 100e6
"""Assumed of an object store."""
POSITION = SparkPosition(folder="spark/1", batch_id=0, offsets="v1")
PHASES = {
    "driver.epoch.begun": "begin",
    "driver.epoch.ran": "pack",
    "driver.pack.written": "manifest",
    "driver.manifest.written": "publish",
    "driver.sinks.committed": "collect",
    "driver.collected": "",
}


class Driver:
    """One driver of a job, and the time of each phase of its epochs."""

    def __init__(self, store: SizesStore, parallelism: int, operators: int, state_bytes: int):
        self.store = store
        graph = chain_graph(operators, GROUP_COUNT)
        job = create_or_open_job(store, graph.name, GROUP_COUNT)
        spec = job_spec(graph, job_id=job.job_id, checkpoint=store.url, backend="heap")
        self.coordinator = Coordinator(
            spec, store, {"out": Noop()}, parallelism=parallelism, retained_epochs=RETAINED_EPOCHS
        )
        self.slots = Slots(self.coordinator, store, state_bytes, SEED)
        self.spent_s: dict[str, float] = {}
        self.carried_bytes = self.answer_bytes = 0
        self._phase, self._since_s = "", 0.0

    def start(self) -> float:
        """Take over; return the CPU seconds."""
        started = time.thread_time()
        self.coordinator.take_over()
        self.coordinator.recover()
        return time.thread_time() - started

    def adopt(self) -> None:
        """Begin with an epoch of an old job."""
        assert self.coordinator.log.last is not None
        self.coordinator.adopt(self.slots.first_epoch(self.coordinator.log.last + 1))

    def run_epoch(self) -> dict[str, float]:
        """Run an epoch; return the CPU seconds of each phase."""
        self.spent_s = dict.fromkeys([*filter(None, PHASES.values()), "read"], 0.0)
        # From here on, whatever is done before the first crash point counts too.
        self._phase, self._since_s = "begin", time.thread_time()
        with call_at_points(self._pass):
            self.coordinator.run_batch(POSITION, self._execute)
        return self.spent_s

    def _pass(self, point: str) -> None:
        if point in PHASES:
            self._enter(PHASES[point])

    def _enter(self, phase: str) -> None:
        now_s = time.thread_time()
        if self._phase:
            self.spent_s[self._phase] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s

    def _execute(self, begin: Begin) -> Outcome:
        self.carried_bytes = len(begin_encoder.encode(begin))
        self._enter("")
        requests = self.store.requests.copy()
        parts = {at: read_part(begin, at, self.store) for at in range(begin.parallelism)}
        self.store.requests = requests  # These are requests of slots.
        acks, reports = self.slots.answer(begin, parts)
        self.answer_bytes = sum(map(len, acks)) + sum(map(len, reports))
        self._enter("read")
        with pause_collector():
            decoded = Outcome(
                [ack_decoder.decode(ack) for ack in acks],
                [report_decoder.decode(each) for each in reports],
            )
        self._enter("pack")
        return decoded


def measure(parallelism: int, epochs: int) -> dict[str, Any]:
    store = SizesStore()
    driver = Driver(store, parallelism, OPERATORS, STATE_BYTES)
    driver.start()
    driver.adopt()
    newest = driver.coordinator.newest
    assert newest is not None
    for _ in range(3):
        driver.run_epoch()
    spent, waited, manifests, requests = [], [], [], []
    while len(spent) < epochs:
        store.requests.clear()
        store.put_bytes = 0
        spent.append(driver.run_epoch())
        requests.append(dict(store.requests))
        own = sum(count for kind, count in store.requests.items() if kind != "slot put")
        waited.append(own * REQUEST_S + store.put_bytes / STORE_BYTES_PER_S)
        number = driver.coordinator.log.last
        manifests.append(len(store.objects[f"{LOG_FOLDER}/{number:012d}.json"]))
    memory = psutil.Process().memory_info().rss
    totals = [sum(each.values()) for each in spent]
    restarted = Driver(store, parallelism, OPERATORS, STATE_BYTES)
    listed = len(store.list("state"))
    restart_s = restarted.start()
    first = restarted.run_epoch()
    return {
        "epoch_ms": ms(np.mean(totals)),
        "epoch_with_store_ms": ms(np.mean(totals) + np.mean(waited)),
        "slowest_epoch_ms": ms(max(totals)),
        "phases_ms": {name: ms(np.mean([each[name] for each in spent])) for name in spent[0]},
        "task_carries_bytes": driver.carried_bytes,
        "answers_bytes": driver.answer_bytes,
        "manifest_bytes": int(np.mean(manifests)),
        "full_manifest_bytes": max(manifests),
        "requests_per_epoch": {
            kind: round(sum(each.get(kind, 0) for each in requests) / len(requests), 1)
            for kind in sorted({kind for each in requests for kind in each})
        },
        "files": listed,
        "memory_mb": round(memory / 1e6),
        "memory_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        "restart_ms": ms(restart_s),
        "first_collection_ms": ms(first["collect"]),
    }


def measure_age(age: int) -> dict[str, Any]:
    """Measure restarts of a young and of an old job."""
    store = SizesStore()
    driver = Driver(store, 1, 1, STATE_BYTES // 1000)
    driver.start()
    driver.adopt()
    found: dict[str, Any] = {}
    for count in (RETAINED_EPOCHS + 2 * FULL_EVERY, age):
        while (driver.coordinator.log.last or 0) < count:
            driver.run_epoch()
        driver = Driver(store, 1, 1, STATE_BYTES // 1000)
        gc.collect()
        found[str(count)] = {
            "restart_ms": ms(driver.start()),
            "records": len(store.list(LOG_FOLDER)),
        }
    return found


def ms(seconds: float) -> float:
    return round(float(seconds) * 1000, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=FULL_EVERY, help="measured epochs per size")
    parser.add_argument("--age", type=int, default=100_000, help="epochs of the old job")
    parser.add_argument("--largest", action="store_true", help="5,000 subtasks, nothing else")
    parser.add_argument("--quick", action="store_true", help="a trial: small jobs, nothing stored")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task = json.loads(options.task)
        print(json.dumps(measure_age(task["age"]) if "age" in task else measure(**task)))
        return
    if options.largest:
        task = {"parallelism": LARGEST, "epochs": options.epochs}
        report("scale_largest", {"sizes": {str(LARGEST): in_fresh_process(task)}})
        return
    sizes = SIZES[:2] if options.quick else SIZES
    found: dict[str, Any] = {}
    for parallelism in sizes:
        task = {"parallelism": parallelism, "epochs": options.epochs}
        found[str(parallelism)] = in_fresh_process(task)
        note(f"{parallelism} subtasks: {found[str(parallelism)]['epoch_ms']} ms per epoch")
    aged = in_fresh_process({"age": 500 if options.quick else options.age})
    young, old = aged.values()
    fewer, more = map(str, sizes[-2:])

    def ratio(name: str) -> float:
        return round(found[more][name] / found[fewer][name], 2)

    report(
        "scale",
        {
            "times_driver_time": ratio("epoch_with_store_ms"),
            "times_driver_cpu": ratio("epoch_ms"),
            "of_subtasks": [int(more), int(fewer)],
            "task_carries_times": ratio("task_carries_bytes"),
            "restart_of_old_job_times": round(old["restart_ms"] / young["restart_ms"], 2),
            "aim": {"times_driver_time": 5.0, "task_carries_times": 1.0},
            "sizes": found,
            "age": aged,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
