"""Several pytest processes share the test files: each takes the next file that none has taken.

    python -m pytest -p tests.lanes --lanes 3 --basetemp FOLDER tests/…

The tests are collected once. Then the process forks: it is the first lane, its children are the
others. Their reports go to files, which the first lane prints when all have ended.

Always true here:
- exactly one lane runs a file, and all of it;
- fast tests are taken before all others, and when one of them fails, no slow one is begun;
- files that take long are taken first, so that none is left when other lanes are done;
- a file marked `first_lane` runs in the process that has collected it, and so has its threads;
- a lane keeps its session fixtures (a Spark session, say) from its first file to its last;
- the exit code is that of a lane that failed, if one did.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

FAST = ("tests/unit/", "tests/contract/")
"""Folders of tests that need seconds, and that a plain mistake fails in."""
FAILED = "a fast test has failed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", type=int, metavar="COUNT", help="share the files among processes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--lanes") and not config.option.collectonly:
        config.pluginmanager.register(Lanes(config))


class Lanes:
    """The lanes of a test run, as one of them sees them."""

    def __init__(self, config: pytest.Config) -> None:
        if config.option.basetemp is None:
            raise pytest.UsageError("--lanes needs --basetemp: each lane has a folder in it")
        self._config = config
        self._base = Path(config.option.basetemp).absolute()
        self._taken = self._base / "taken"
        self._others: list[tuple[int, Path]] = []
        """Process id and report of each other lane; empty in those lanes."""
        self._first: int | None = None
        """In another lane: where the first one writes its errors, as a file descriptor."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        if session.testsfailed:
            return None  # Not all could be collected; pytest says so.
        shutil.rmtree(self._base, ignore_errors=True)
        self._taken.mkdir(parents=True)
        started = [each for each in threading.enumerate() if each is not threading.main_thread()]
        assert not started, f"modules have started threads, which no lane would have: {started}"
        # The tests stay until the end: the garbage collector need not look at them again.
        gc.collect()
        gc.freeze()
        self._fork(self._config.getoption("--lanes"))
        for items in take(self._taken, in_order(session.items), is_first=self._first is None):
            # After the last test of a file all fixtures end but those of the session: which file
            # is next is not known before it is taken, and it is taken when there is time for it.
            for item, following in zip(items, [*items[1:], session], strict=True):
                if is_in_vain(self._taken, item):
                    return True
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        if report.nodeid.startswith(FAST):
            (self._taken / FAILED).mkdir(parents=True, exist_ok=True)
        if self._first is not None:
            # A terminal that is gone: then it is in this lane's report alone.
            with contextlib.suppress(OSError):
                os.write(self._first, f"\nFAILED {report.nodeid}, in another lane\n".encode())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        result = yield
        for pid, report in self._others:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            sys.stdout.write(report.read_text())
            if code != 0:
                sys.stdout.write(f"a lane has ended with exit code {code}\n")
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        sys.stdout.flush()
        return result

    def _fork(self, count: int) -> None:
        """Start the other lanes; in each process, set up what a lane has for itself."""
        number = 1
        for other in range(2, count + 1):
            report = self._base / f"lane-{other}.log"
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                number, self._others, self._first = other, [], os.dup(2)
                self._report_to(report)
                break
            self._others.append((pid, report))
        # Its temporary folders are made at the first use, so this comes in time.
        self._config._tmp_path_factory._given_basetemp = self._base / str(number)  # type: ignore[attr-defined]

    def _report_to(self, path: Path) -> None:
        """Write to a file what this process has printed to its output so far."""
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        # Capturing keeps the output it came upon, and puts it back.
        capture.stop_global_capturing()
        with path.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()


def is_in_vain(folder: Path, item: pytest.Item) -> bool:
    """Whether it is a slow test, and a fast one has failed by now, in whichever lane."""
    return not item.nodeid.startswith(FAST) and (folder / FAILED).exists()


def take(
    folder: Path, files: Sequence[list[pytest.Item]], *, is_first: bool
) -> Iterator[list[pytest.Item]]:
    """The tests of the files this process gets, a file at a time."""
    for items in files:
        if is_in_vain(folder, items[0]):
            return
        if not is_first and items[0].get_closest_marker("first_lane") is not None:
            continue
        try:
            # Of those who make the same folder, one succeeds.
            (folder / "-".join(items[0].path.parts[1:])).mkdir()
        except FileExistsError:
            continue
        yield items


def weight(item: pytest.Item) -> float:
    """How long it may take, roughly: a slow test says so, and one that is very slow by how much."""
    if item.get_closest_marker("slow") is not None:
        timeout = item.get_closest_marker("timeout")
        return timeout.args[0] if timeout is not None else 100
    return 5 if "spark" in getattr(item, "fixturenames", ()) else 1


def in_order(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Tests by file: fast ones first, then files that take long before others."""
    # pytest may have put tests of several files in turn, for the sake of a fixture they share.
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return sorted(
        files.values(),
        key=lambda file: (not file[0].nodeid.startswith(FAST), -sum(map(weight, file))),
    )
