"""Pages of the documentation as programs: their blocks run unchanged, from top to bottom.

    ```python          runs in the page's own namespace, in order
    ```bash            lines that begin with `cairn` run; others must be one of a few commands
    ```output          the output of the block before it; … stands for anything
    ```python no-run   another system's code, to compare with: only on the pages of OTHERS
    <!-- run … -->     runs like python and is not shown: input that a page assumes, and checks

Always true here:
- a page has its own working folder, and shares nothing with other pages;
- a block of an unknown language is an error, and so is an unknown command.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer
import typer.main
from typer.testing import CliRunner

from cairn.cli import app

DOCS = Path(__file__).parents[2] / "docs"
OTHERS = {"migration/flink.md"}
"""Pages with code of a system that is not installed."""
SHOWN_ONLY = {"", "ini", "java", "json", "nginx", "sql", "text", "yaml", "{toctree}", "{eval-rst}"}
OTHER_COMMANDS = {"curl", "export", "git", "make", "pip", "python"}
STARTS_SOMETHING = {"run", "explain", "demo", "dashboard", "handover"}
"""Commands that start Spark, do not end or need a running job: only arguments are checked."""

_BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$|^<!-- run\n(?P<hidden>.*?)^-->$",
                    re.DOTALL | re.MULTILINE)  # fmt: skip


class Block(NamedTuple):
    language: str
    code: str
    line: int
    is_run: bool = True
    is_hidden: bool = False


class Page:
    """One page; `name` is its path under docs/."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = DOCS / name
        self.text = self.path.read_text()
        self.blocks = list(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        for found in _BLOCK.finditer(self.text):
            line = self.text.count("\n", 0, found.start()) + 2
            if found["hidden"] is not None:
                yield Block("python", found["hidden"], line, is_hidden=True)
                continue
            language, *flags = found["info"].split() or [""]
            yield Block(language, found["code"], line, is_run="no-run" not in flags)

    @property
    def needs_spark(self) -> bool:
        return any(
            block.is_run and block.language == "python" and re.search(r"\bspark\b", block.code)
            for block in self.blocks
        )

    @property
    def is_program(self) -> bool:
        return any(block.is_run and block.language in ("python", "bash") for block in self.blocks)

    @property
    def says_what_comes_out(self) -> bool:
        """True if a run can fail without raising an exception: it has output or an assert."""
        return any(
            block.language == "output"
            or (block.language == "python" and block.is_run and "assert " in block.code)
            for block in self.blocks
        )

    def run(self, names: dict[str, Any], replace: Mapping[str, str] | None = None) -> None:
        """Run it in the current folder. `replace` maps addresses to those of the test."""
        names.setdefault("__name__", "__main__")
        printed = ""
        for block in self.blocks:
            code = block.code
            for old, new in (replace or {}).items():
                code = code.replace(old, new)
            if block.language == "output":
                assert is_output(code, printed), f"{self._at(block)}: it printed\n{printed}"
            elif block.language == "python" and block.is_run:
                printed = self._run_python(code, block, names)
            elif block.language == "bash" and block.is_run:
                printed = self._run_commands(code, block)

    def _run_python(self, code: str, block: Block, names: dict[str, Any]) -> str:
        out = io.StringIO()
        # Tracebacks show the page's own lines.
        compiled = compile("\n" * (block.line - 1) + code, str(self.path), "exec")
        with contextlib.redirect_stdout(out):
            exec(compiled, names)
        return out.getvalue()

    def _run_commands(self, code: str, block: Block) -> str:
        printed = ""
        for args in commands(code):
            if args[0] != "cairn":
                continue
            if args[1] in STARTS_SOMETHING:
                check_arguments(args[1:])
                continue
            result = CliRunner().invoke(app, args[1:], env={"COLUMNS": "100"})
            assert result.exit_code == 0, f"{self._at(block)}: {shlex.join(args)}\n{result.output}"
            printed += result.stdout
        return printed

    def _at(self, block: Block) -> str:
        return f"docs/{self.name}:{block.line}"


def commands(code: str) -> Iterator[list[str]]:
    """Yield the commands of a shell block, without comments; a line may end in a backslash."""
    for line in code.replace("\\\n", " ").splitlines():
        args = shlex.split(line, comments=True)
        if args:
            yield args


def check_arguments(args: list[str]) -> None:
    """Parse a command as the command line would, without running it."""
    group: Any = typer.main.get_command(app)
    assert args[0] in group.commands, f"unknown command {args[0]!r}"
    group.commands[args[0]].make_context(args[0], list(args[1:]), parent=typer.Context(group))


def is_output(expected: str, found: str) -> bool:
    """True if a text was printed; … stands for anything, trailing blanks are ignored."""
    pattern = ".*?".join(re.escape(part) for part in _trim(expected).split("…"))
    return re.fullmatch(pattern, _trim(found), re.DOTALL) is not None


def _trim(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def pages() -> list[str]:
    """Return every page of the site."""
    found = (path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
    return sorted(str(path) for path in found if not path.parts[0].startswith("_"))


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
