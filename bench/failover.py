"""How long is a job down when its driver is killed: cold restart, warm standby, hot standby?

The driver and its JVM are killed (SIGKILL) while small files keep coming. The gap ends with the
next committed epoch. Detection is the time until a standby is granted the lead, start is the rest.
A cold restart is a new process that is started at once: its detection is nothing.

Every size and backend is measured with ZooKeeper. `store:` and Kubernetes (a small imitation of its
API in this process) differ in the detection alone, so they are measured at one size. The complete
run takes about twenty minutes; `--add` keeps the cases of earlier runs, so it can be done in parts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import RESULTS, Feed, file_stream, note, report, work_dir
from keyed_count import counting_job

from cairn.logs import logger
from cairn.storage.log import Log, record_path
from cairn.storage.manifest import Epoch
from cairn.storage.store import open_store

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kubernetes_api import KubernetesApi
from tests.zookeeper import ZooKeeper

GROUPS = ("zookeeper", "store", "kubernetes")
EVERYWHERE = "zookeeper"
"""The leadership that is measured with every size and backend."""
ONE_SIZE = ("heap", 1_000_000)
"""Where the other leaderships are measured."""
SESSION = "2s"
FEED_S = 0.5
SMALL_ROWS = 200
NEAR_S = 5.0
PATIENCE_S = 600
LOADED = 0.999
"""RocksDB estimates the number of keys that a large delta adds."""
QUIET_S = 3.0
"""Between the start of a standby and the kill: a healthy job runs."""


class Driver:
    """A driver in a process of its own, with a Spark of its own. It prints its log as JSON."""

    def __init__(self, work: Path, backend: str, ha: str = "", standby: str = "warm") -> None:
        task = {"work": str(work), "backend": backend, "ha": ha, "standby": standby}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--drive", json.dumps(task)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[tuple[float, str] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("["):
                self._lines.put(tuple(json.loads(line)))
        self._lines.put(None)

    def await_line(self, text: str) -> float:
        """Return the time of the next message that begins like this."""
        while True:
            line = self._lines.get(timeout=PATIENCE_S)
            if line is None:
                raise SystemExit(f"a driver has ended before it said {text!r}")
            if line[1].startswith(text):
                return line[0]

    def kill(self) -> float:
        killed_s = time.time()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return killed_s


def drive(task: dict[str, str]) -> None:
    """Run the job, or wait for the lead of it."""
    import cairn
    from cairn import sinks

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(json.dumps([record.created, record.getMessage()]), flush=True)

    logger.addHandler(Lines())
    logger.setLevel(logging.DEBUG)
    work = Path(task["work"])
    spark = cairn.session("failover", master="local[2]")
    job = counting_job(file_stream(spark, work / "input"), sinks.Noop())
    more = {"ha": task["ha"], "standby": task["standby"]} if task["ha"] else {}
    job.start(
        checkpoint=str(work / "checkpoint"),
        parallelism=2,
        backend=task["backend"],
        trigger="0 seconds",
        retained_epochs=50,
        **more,
    ).wait()


class Subject:
    """A job with its input and checkpoint, whose drivers are killed one after the other."""

    def __init__(self, work: Path, backend: str, keys: int) -> None:
        self.work, self.backend, self.keys = work, backend, keys
        self._feed = Feed(work / "input")
        self._checkpoint = work / "checkpoint"
        self._is_over = threading.Event()
        self._feed.put_all_keys(keys or SMALL_ROWS)
        self._loaded = self._feed.files
        self._feeding = threading.Thread(target=self._put, daemon=True)
        self._feeding.start()

    def _put(self) -> None:
        rng = np.random.default_rng(7)
        while not self._is_over.wait(FEED_S):
            self._feed.put(rng.integers(0, max(self.keys, SMALL_ROWS), SMALL_ROWS))

    def close(self) -> None:
        self._is_over.set()
        self._feeding.join()

    def driver(self, **options: str) -> Driver:
        return Driver(self.work, self.backend, **options)

    def newest(self) -> Epoch | None:
        return Log(open_store(str(self._checkpoint))).newest_epoch()

    def await_loaded(self) -> None:
        """Wait until all keys are in the state, and the driver has caught up with the input."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            epoch = self.newest() if (self._checkpoint / "epochs").exists() else None
            if epoch is not None:
                keys = sum(part.state_keys or 0 for part in epoch.operators["count"].ranges)
                is_near = time.time() - epoch.wall_ms / 1000 < NEAR_S
                rows = epoch.metrics.operators["count"].rows_in
                if keys >= LOADED * self.keys and is_near and rows <= 10 * SMALL_ROWS:
                    return
            time.sleep(0.2)
        raise SystemExit(f"{self.keys} keys were not loaded in {PATIENCE_S} s")

    def await_epoch(self, after: Epoch) -> tuple[float, int]:
        """Return the time of the first epoch of a later term, and its restored subtasks."""
        deadline_s = time.monotonic() + PATIENCE_S
        log = Log(open_store(str(self._checkpoint)))
        number = after.number
        while time.monotonic() < deadline_s:
            path = self._checkpoint / record_path(number + 1)
            if not path.exists():
                time.sleep(0.01)
                continue
            number += 1
            record = log.read(number)
            if isinstance(record, Epoch) and record.term > after.term:
                return path.stat().st_mtime, record.metrics.restored
        raise SystemExit(f"no epoch after {number} in {PATIENCE_S} s")


def fail_over(subject: Subject, leader: Driver, ha: str, standby: str) -> tuple[Driver, Any]:
    """Start a standby, kill the leader; return the standby, which leads now, and the times."""
    other = subject.driver(ha=ha, standby=standby)
    other.await_line("standby: the slots are ready")
    time.sleep(QUIET_S)
    before = subject.newest()
    assert before is not None, "loaded"
    killed_s = leader.kill()
    granted_s = other.await_line("this driver is granted the lead")
    committed_s, restored = subject.await_epoch(before)
    return other, {
        "detection_s": granted_s - killed_s,
        "start_s": committed_s - granted_s,
        "restored": restored,
    }


def restart(subject: Subject, leader: Driver) -> tuple[Driver, Any]:
    """Kill the driver and start another one at once."""
    time.sleep(QUIET_S)
    before = subject.newest()
    assert before is not None, "loaded"
    killed_s = leader.kill()
    other = subject.driver()
    committed_s, restored = subject.await_epoch(before)
    return other, {"detection_s": 0.0, "start_s": committed_s - killed_s, "restored": restored}


def measure(backend: str, keys: int, groups: dict[str, str], repeats: int) -> list[Any]:
    """Return the median times of each way to go on, for a job of this size."""
    found = []
    with work_dir() as work:
        subject = Subject(work, backend, keys)
        leader = subject.driver()
        try:
            subject.await_loaded()
            cases: list[tuple[str, str, Any]] = [("cold", "", None)]
            cases += [(warmth, name, ha) for name, ha in groups.items() for warmth in WARMTHS]
            group = ""
            for kind, name, ha in cases:
                if name != group:
                    # The group's first leader continues the job.
                    leader.kill()
                    group, leader = name, subject.driver(ha=ha)
                    leader.await_line("the job runs on")
                    subject.await_loaded()
                times = []
                for _ in range(repeats):
                    if kind == "cold":
                        leader, took = restart(subject, leader)
                    else:
                        leader, took = fail_over(subject, leader, ha, kind)
                    times.append(took)
                    note(f"  {kind} {name}: {took}")
                    subject.await_loaded()
                median = {
                    fact: round(statistics.median(each[fact] for each in times), 2)
                    for fact in times[0]
                }
                total_s = median["detection_s"] + median["start_s"]
                about = {"backend": backend, "keys": keys, "kind": kind, "group": name}
                found.append({**about, **median, "total_s": round(total_s, 2)})
        finally:
            leader.kill()
            subject.close()
    return found


WARMTHS = ("warm", "hot")


class Services:
    """The services that leaderships need, on this machine."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self._zookeeper = ZooKeeper() if "zookeeper" in names else None
        self._kubernetes = KubernetesApi() if "kubernetes" in names else None
        if self._kubernetes is not None:
            # The drivers inherit it.
            os.environ["KUBECONFIG"] = str(self._kubernetes.write_kubeconfig(folder / "kubeconfig"))

    def url(self, name: str, job: str) -> str:
        """Return the address of a group of its own for a job."""
        if self._zookeeper is not None and name == "zookeeper":
            return f"zookeeper://{self._zookeeper.hosts}/{job}?session={SESSION}"
        if name == "kubernetes":
            return f"kubernetes:lease/{job}?lease={SESSION}"
        return f"store:?lease={SESSION}"

    def close(self) -> None:
        if self._zookeeper is not None:
            self._zookeeper.close()
        if self._kubernetes is not None:
            self._kubernetes.stop()


def cases_of(options: argparse.Namespace, services: Services) -> list[Any]:
    """Measure what the options name."""
    found = []
    for backend in options.backends:
        for keys in options.keys:
            is_here = options.everywhere or (backend, keys) == ONE_SIZE
            names = [name for name in options.groups if is_here or name == EVERYWHERE]
            note(f"{backend}, {keys:,} keys: {', '.join(names)}")
            groups = {name: services.url(name, f"failover-{backend}-{keys}") for name in names}
            found += measure(backend, keys, groups, options.repeats)
    return found


def name_of(case: Any) -> tuple[Any, ...]:
    return case["backend"], case["keys"], case["kind"], case["group"]


def with_earlier(found: list[Any]) -> list[Any]:
    """Return these cases and those of the last result that were not measured again."""
    file = RESULTS / "failover.json"
    earlier = json.loads(file.read_text())["cases"] if file.exists() else []
    every = {name_of(case): case for case in [*earlier, *found]}
    return [every[name] for name in sorted(every)]


def with_ratios(found: list[Any]) -> list[Any]:
    """Add how long each way takes, compared with the cold restart of the same job."""
    cold = {(each["backend"], each["keys"]): each for each in found if each["kind"] == "cold"}
    for each in found:
        whole_s = cold[each["backend"], each["keys"]]["total_s"]
        each["of_cold"] = round(each["total_s"] / whole_s, 2)
    return found


def summary(found: list[Any]) -> dict[str, Any]:
    """Return the longest times and the median ratio of warm and of hot standbys."""
    facts: dict[str, Any] = {"start_s_max": {}, "total_s_max": {}, "of_cold": {}}
    for kind in WARMTHS:
        alike = [each for each in found if each["kind"] == kind]
        facts["start_s_max"][kind] = max(each["start_s"] for each in alike)
        facts["total_s_max"][kind] = max(each["total_s"] for each in alike)
        facts["of_cold"][kind] = round(statistics.median(each["of_cold"] for each in alike), 2)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a trial: small, one of each")
    parser.add_argument("--keys", type=int, nargs="*")
    parser.add_argument("--backends", nargs="*")
    parser.add_argument("--groups", nargs="*", default=GROUPS, choices=GROUPS)
    parser.add_argument("--everywhere", action="store_true", help="all groups at every size")
    parser.add_argument("--add", action="store_true", help="keep the cases of earlier runs")
    parser.add_argument("--repeats", type=int)
    options = parser.parse_args()
    if options.drive:
        drive(json.loads(options.drive))
        return
    is_quick = options.quick
    options.keys = options.keys or ([0, 100_000] if is_quick else [0, 1_000_000, 5_000_000])
    options.backends = options.backends or (["heap"] if is_quick else ["heap", "rocksdb"])
    options.repeats = options.repeats or (1 if is_quick else 2)
    with work_dir() as folder:
        services = Services(options.groups, folder)
        try:
            found = cases_of(options, services)
        finally:
            services.close()
    found = with_ratios(with_earlier(found) if options.add else found)
    result = {
        "session": SESSION,
        "repeats": options.repeats,
        "cases": found,
        **summary(found),
    }
    report("failover", result, keep=not is_quick)


if __name__ == "__main__":
    main()
