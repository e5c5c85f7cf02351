"""The pages of the documentation that need no Spark: their programs and commands run.

tests/spark/test_guide.py runs the others in the same way.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cairn.operators.aggregates.parse import FUNCTIONS
from tests.docs.pages import (
    DOCS,
    OTHER_COMMANDS,
    OTHERS,
    SHOWN_ONLY,
    Page,
    check_arguments,
    commands,
    is_output,
    pages,
    working_in,
)

PAGES = [Page(name) for name in pages()]


@pytest.mark.parametrize("document", [p for p in PAGES if p.is_program and not p.needs_spark],
                         ids=lambda document: document.name)  # fmt: skip
def test_the_programs_of_a_page_run(document: Page, tmp_path: Path) -> None:
    with working_in(tmp_path):
        document.run({})


def test_every_page_with_a_program_says_what_must_come_out() -> None:
    """Except the guide to sinks: its test reads what it has written."""
    silent = [p.name for p in PAGES if p.is_program and not p.says_what_comes_out]
    assert silent == ["guide/sinks.md"]


@pytest.mark.parametrize("document", PAGES, ids=lambda document: document.name)
def test_every_block_is_of_a_language_that_is_checked_or_only_shown(document: Page) -> None:
    for block in document.blocks:
        where = f"docs/{document.name}:{block.line}"
        assert block.language in {"python", "bash", "output"} | SHOWN_ONLY, where
        assert block.is_run or document.name in OTHERS, f"{where}: code of cairn must run"
        if block.language == "bash":
            for args in commands(block.code):
                assert args[0] == "cairn" or args[0] in OTHER_COMMANDS, f"{where}: {args}"


@pytest.mark.parametrize("document", PAGES, ids=lambda document: document.name)
def test_no_block_of_a_page_is_left_open(document: Page) -> None:
    fences = sum(line.startswith("```") for line in document.text.splitlines())
    assert fences == 2 * sum(not block.is_hidden for block in document.blocks)
    hidden = sum(line == "<!-- run" for line in document.text.splitlines())
    assert hidden == sum(block.is_hidden for block in document.blocks)


def test_files_that_are_linked_to_outside_the_site_are_there() -> None:
    """The build of the site checks the links within it."""
    root = DOCS.parent
    links = [
        (page.name, target)
        for page in sorted(root.glob("*.md"))
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in target
    ]
    assert "README.md" in dict(links)
    assert [link for link in links if not (root / link[1]).exists()] == []


def test_the_guide_names_every_function_that_aggregates() -> None:
    text = Page("guide/batches.md").text
    assert not [name for name in FUNCTIONS if f"`{name}`" not in text]


def test_output_is_compared_and_an_ellipsis_stands_for_anything() -> None:
    assert is_output("a\n… c\n", "a\nb c\n")
    assert is_output("a  \n", "a\n")
    assert not is_output("a\n", "a\nb\n")
    assert not is_output("a.c\n", "abc\n")


def test_arguments_of_a_command_that_is_not_run_are_checked() -> None:
    check_arguments(["run", "job.py:build", "--checkpoint", "ckpt"])
    with pytest.raises(Exception, match="No such option"):
        check_arguments(["run", "job.py:build", "--checkpoint", "ckpt", "--no-such-option"])
    with pytest.raises(AssertionError, match="unknown command"):
        check_arguments(["fly"])
