"""One word for one thing: names that were given up do not come back. See "Words" in the docs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import cairn

SOURCE = Path(cairn.__file__).parent
ROOMS = ("protocol", "worker", "slot", "driver", "sinks", "run.py")
"""The code that a batch, a round and an attempt pass through."""

GIVEN_UP = {
    "run_epoch": "run_batch: an epoch may have several batches",
    "step": "execution: batch, attempt and round",
    "pass_": "batch or round",
    "pass_index": "batch or round",
    "pass_number": "batch or round",
    "part": "batch, or the thing that it is a part of",
    "part_index": "batch",
    "attempt_of": "Execution, with named fields",
    "round_of": "Execution, with named fields",
    "groups_in": "partial_count: `groups` are key groups",
    "EntrySpec": "ScopedState: an `entry` is an entry of a map",
    "entries_of": "states_by_scope: an `entry` is an entry of a map",
    "records_entry": "feedback_state: an `entry` is an entry of a map",
}

PACKS: frozenset[tuple[str, str]] = frozenset({("sinks/postgres/ledger.py", "ordinal")})
"""Functions that may make one number of an execution: a column of the database holds it."""


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of functions, classes, parameters, fields and attributes; local variables aside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.value.lineno, node.arg
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield each.lineno, each.target.id


def packed(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Products of a batch, a round or an attempt: two numbers that are made one."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.LShift):
                for side in (node.left, node.right):
                    name = side.attr if isinstance(side, ast.Attribute) else ""
                    name = side.id if isinstance(side, ast.Name) else name
                    if name in {"batch", "round", "attempt"}:
                        yield node.lineno, function.name, name


def findings(source: str, path: str) -> list[str]:
    tree = ast.parse(source)
    found = [
        f"{path}:{line}: {name}; write {GIVEN_UP[name]}"
        for line, name in names(tree)
        if name in GIVEN_UP
    ]
    found += [
        f"{path}:{line}: {name} becomes part of another number; pass an Execution"
        for line, function, name in packed(tree)
        if (path, function) not in PACKS
    ]
    return found


def files() -> Iterator[Path]:
    for room in ROOMS:
        yield from (
            [SOURCE / room] if room.endswith(".py") else sorted((SOURCE / room).rglob("*.py"))
        )


def test_words_that_were_given_up_do_not_come_back() -> None:
    found = [
        finding
        for path in files()
        for finding in findings(path.read_text(), path.relative_to(SOURCE).as_posix())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "def run_epoch(position): ...",
        "def commit(epoch, part): ...",
        "class Report:\n    step: int = 0",
        "token = (begin.epoch, begin.step)",
        "sink.commit(2, prepared, part=1)",
        "class EntrySpec: ...",
        "def attempt_number(attempt, n):\n    return attempt + 1000 * n if n else 1000 * attempt",
        "def number(at):\n    return at.batch * 1000 + at.round",
    ],
)
def test_a_word_that_was_given_up_is_found(source: str) -> None:
    assert len(findings(source, "slot/example.py")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def commit(epoch, batch): ...",
        "step = 5\nfor part in parts: print(part)",
        "def delay_s(attempts):\n    return 0.1 * 2**attempts",
        "parts = text.partition(':')",
    ],
)
def test_other_words_are_left_alone(source: str) -> None:
    assert findings(source, "slot/example.py") == []


def test_every_room_is_looked_into() -> None:
    rooms = {path.relative_to(SOURCE).parts[0] for path in files()}
    assert rooms == set(ROOMS)
