"""Several pytest processes share the test files: each takes the next file that none has taken.

    python -m pytest -p tests.lanes --lanes FOLDER tests/…

Always true here:
- of the processes that are given the same folder, exactly one runs a file, and all of it;
- files that take long are taken first, so that none is left when other lanes are done;
- a process keeps its session fixtures (a Spark session, say) from its first file to its last.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", type=Path, metavar="FOLDER", help="where files are taken")


def take(folder: Path, files: dict[Path, list[pytest.Item]]) -> Iterator[pytest.Item]:
    """The tests of the files this process gets, a file at a time."""
    for path, items in files.items():
        try:
            # Of those who make the same folder, one succeeds.
            (folder / "-".join(path.parts[1:])).mkdir(parents=True)
        except FileExistsError:
            continue
        yield from items


def weight(item: pytest.Item) -> float:
    """How long it may take, roughly: a slow test says so, and one that is very slow by how much."""
    if item.get_closest_marker("slow") is None:
        return 1
    timeout = item.get_closest_marker("timeout")
    return timeout.args[0] if timeout is not None else 100


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    folder = session.config.getoption("--lanes")
    if folder is None or session.config.option.collectonly or session.testsfailed:
        return None
    # pytest may have put tests of several files in turn, for the sake of a fixture they share.
    files: dict[Path, list[pytest.Item]] = {}
    for item in session.items:
        files.setdefault(item.path, []).append(item)
    long_first = sorted(files, key=lambda path: -sum(map(weight, files[path])))
    items = take(folder, {path: files[path] for path in long_first})
    item = next(items, None)
    while item is not None:
        # Fixtures that the next test needs stay: without one, all would end.
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True
