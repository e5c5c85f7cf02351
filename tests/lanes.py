"""Several pytest processes share the test files: each takes the next file that none has taken.

    python -m pytest -p tests.lanes --lanes FOLDER [--tell FILE] tests/…

Always true here:
- of the processes that are given the same folder, exactly one runs a file, and all of it;
- fast tests are taken before all others, and when one of them fails, no slow one is begun;
- files that take long are taken first, so that none is left when other lanes are done;
- a process keeps its session fixtures (a Spark session, say) from its first file to its last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

FAST = ("tests/unit/", "tests/contract/")
"""Folders of tests that need seconds, and that a plain mistake fails in."""
FAILED = "a fast test has failed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", type=Path, metavar="FOLDER", help="where files are taken")
    parser.addoption("--tell", type=Path, metavar="FILE", help="where a failure is told at once")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Teller(config.getoption("--lanes"), config.getoption("--tell")))


class Teller:
    """Passes on that a test has failed, while others still run."""

    def __init__(self, folder: Path | None, told: Path | None) -> None:
        self._folder = folder
        self._told = told

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        if self._folder is not None and report.nodeid.startswith(FAST):
            (self._folder / FAILED).mkdir(parents=True, exist_ok=True)
        if self._told is not None:
            # A terminal that is gone, or a socket: then it is in this lane's log alone.
            with contextlib.suppress(OSError), self._told.open("a") as file:
                file.write(f"\nFAILED {report.nodeid}, in another lane\n")


def is_in_vain(folder: Path, item: pytest.Item) -> bool:
    """Whether it is a slow test, and a fast one has failed by now, in whichever lane."""
    return not item.nodeid.startswith(FAST) and (folder / FAILED).exists()


def take(folder: Path, files: Sequence[list[pytest.Item]]) -> Iterator[list[pytest.Item]]:
    """The tests of the files this process gets, a file at a time."""
    for items in files:
        if is_in_vain(folder, items[0]):
            return
        try:
            # Of those who make the same folder, one succeeds.
            (folder / "-".join(items[0].path.parts[1:])).mkdir(parents=True)
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


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    folder = session.config.getoption("--lanes")
    if folder is None or session.config.option.collectonly or session.testsfailed:
        return None
    for items in take(folder, in_order(session.items)):
        # After the last test of a file all fixtures end but those of the session: which file is
        # next is not known before it is taken, and it is taken when there is time for it.
        for item, following in zip(items, [*items[1:], session], strict=True):
            if is_in_vain(folder, item):
                return True
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True
