"""Docstrings, comments, messages and names of functions keep to plain English."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import cairn

SOURCE = Path(cairn.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
# "What is done is announced" names no thing: a sentence begins with the thing it is about.
HEADLESS = re.compile(r"(What|Who|Whom|Whose|Whoever|Whatever|Where|Of|Whether|How|When|Which)\b")
GIVEN_UP = re.compile(
    r"\b(anew|so many|so much|is no|are no|was no|tells|said|whoever|sees? to)\b", re.IGNORECASE
)
# Participles that do not end in -ed. A function is named by a verb.
IRREGULAR = {
    "begun", "brought", "built", "chosen", "done", "drawn", "found", "given", "gone",
    "held", "hidden", "kept", "known", "lost", "made", "met", "said", "seen", "sent",
    "shown", "taken", "told", "understood", "woken", "written",
}  # fmt: skip
# Verbs that look like participles, and participles that are adjectives of the noun behind them.
OTHERS = {
    "bound", "closed", "embed", "exceed", "feed", "left", "need", "proceed", "seed", "shared",
    "shed", "simulated", "speed",
}  # fmt: skip


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    if isinstance(child.value.value, str):
                        yield child.lineno, child.value.value.strip()


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield whole comments: lines that follow each other belong together."""
    first, column, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, at = token.start
        if lines and (row, at) == (first + len(lines), column):
            lines.append(token.string.lstrip("#: "))
            continue
        if lines:
            yield first, " ".join(lines)
        first, column, lines = row, at, [token.string.lstrip("#: ")]
    if lines:
        yield first, " ".join(lines)


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module that have more than one word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def is_participle(name: str) -> bool:
    first = name.strip("_").split("_")[0]
    is_regular = first.endswith("ed") and len(first) > 4
    return first not in OTHERS and (is_regular or first in IRREGULAR)


def faults(text: str) -> Iterator[str]:
    """Yield what is wrong in a module, with the line."""
    tree = ast.parse(text)
    said = [*texts(tree), *comments(text)]
    for line, sentence in said:
        if HEADLESS.match(sentence):
            yield f"{line}: begins without a subject: {sentence[:60]}"
    for line, sentence in {*said, *messages(tree)}:
        for word in GIVEN_UP.finditer(sentence):
            yield f"{line}: {word[1]!r} in: {sentence[max(word.start() - 30, 0) :][:60]}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node.name):
            if not any("property" in ast.unparse(each) for each in node.decorator_list):
                yield f"{node.lineno}: a function named by a participle: {node.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_is_in_plain_english(path: Path) -> None:
    assert not list(faults(path.read_text()))


def test_faults_are_found() -> None:
    module = '''
"""What is done here."""
# Of these, some.
def packed() -> str:
    """Return it anew."""
    return "there is no way"
'''
    assert len(list(faults(module))) == 5
