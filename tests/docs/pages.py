"""Pages of the documentation as programs: what they show is run as it stands, from top to bottom.

    ```python          runs in the page's own namespace, in order
    ```bash            lines that begin with `cairn` run, other commands are of a few known ones
    ```output          what the block before it has printed; … stands for anything
    ```python no-run   another system's code, to compare with: only on the pages of OTHERS
    <!-- run … -->     runs like python and is not shown: input that a page assumes, and checks

Always true here:
- a page has a folder of its own as its working folder, and nothing of another page;
- a block of a language that is not known is an error, and so is a command.
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
"""Pages with code that belongs to a system which is not here."""
SHOWN_ONLY = {"", "ini", "java", "json", "nginx", "sql", "text", "yaml", "{toctree}", "{eval-rst}"}
OTHER_COMMANDS = {"curl", "export", "git", "make", "pip", "python"}
STARTS_SOMETHING = {"run", "explain", "demo", "dashboard"}
"""Commands that start Spark or go on for ever: their arguments are checked, no more."""

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
        """Whether a run can fail by anything but an exception of its own."""
        return any(
            block.language == "output"
            or (block.language == "python" and block.is_run and "assert " in block.code)
            for block in self.blocks
        )

    def run(self, names: dict[str, Any], replace: Mapping[str, str] | None = None) -> None:
        """Run it in the current folder. `replace`: addresses that are other ones in tests."""
        names.setdefault("__name__", "__main__")
        said = ""
        for block in self.blocks:
            code = block.code
            for old, new in (replace or {}).items():
                code = code.replace(old, new)
            if block.language == "output":
                assert is_output(code, said), f"{self._at(block)}: it printed\n{said}"
            elif block.language == "python" and block.is_run:
                said = self._run_python(code, block, names)
            elif block.language == "bash" and block.is_run:
                said = self._run_commands(code, block)

    def _run_python(self, code: str, block: Block, names: dict[str, Any]) -> str:
        out = io.StringIO()
        # Tracebacks show the page's own lines.
        compiled = compile("\n" * (block.line - 1) + code, str(self.path), "exec")
        with contextlib.redirect_stdout(out):
            exec(compiled, names)
        return out.getvalue()

    def _run_commands(self, code: str, block: Block) -> str:
        said = ""
        for args in commands(code):
            if args[0] != "cairn":
                continue
            if args[1] in STARTS_SOMETHING:
                check_arguments(args[1:])
                continue
            result = CliRunner().invoke(app, args[1:], env={"COLUMNS": "100"})
            assert result.exit_code == 0, f"{self._at(block)}: {shlex.join(args)}\n{result.output}"
            said += result.stdout
        return said

    def _at(self, block: Block) -> str:
        return f"docs/{self.name}:{block.line}"


def commands(code: str) -> Iterator[list[str]]:
    """The commands of a shell block, without comments; a line may end in a backslash."""
    for line in code.replace("\\\n", " ").splitlines():
        args = shlex.split(line, comments=True)
        if args:
            yield args


def check_arguments(args: list[str]) -> None:
    """Parse a command as the command line would, and do not run it."""
    group: Any = typer.main.get_command(app)
    assert args[0] in group.commands, f"there is no command {args[0]!r}"
    group.commands[args[0]].make_context(args[0], list(args[1:]), parent=typer.Context(group))


def is_output(expected: str, found: str) -> bool:
    """Whether a text was printed; … stands for anything, blanks at the ends of lines for none."""
    pattern = ".*?".join(re.escape(part) for part in _trimmed(expected).split("…"))
    return re.fullmatch(pattern, _trimmed(found), re.DOTALL) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def pages() -> list[str]:
    """Every page of the site."""
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
