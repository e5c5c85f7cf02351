"""Generate the reference pages when the site is built, from the commands and public names.

    <!-- cairn: commands -->       in a page: every command of `cairn`, with arguments and options
    <!-- cairn: names cairn -->    every public name of a module, from its docstrings

Always true here:
- every public command and name is in the reference, without a list to maintain;
- docstrings are plain text with `code` in backticks and indented programs: nothing in them is
  read as other markup.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
import typer.main

_MARK = re.compile(r"^<!-- cairn: (commands|names) ?(\S*) -->$", re.MULTILINE)
# The names that readers look for first; the others follow alphabetically.
_FIRST = (
    "Job", "session", "spark_config", "Stream", "KeyedStream", "KeyedProcess", "Process",
    "BatchProcess", "Run", "Answer",
)  # fmt: skip
_RICH = re.compile(r"\[/?dim\]")


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", _fill_in)
    app.connect("autodoc-process-docstring", _as_rst)
    app.connect("autodoc-process-signature", _without_protocol)
    return {"parallel_read_safe": True, "version": "1"}


def _fill_in(app: Any, name: str, source: list[str]) -> None:
    def generate(mark: re.Match[str]) -> str:
        return "\n".join(command_lines() if mark[1] == "commands" else name_lines(mark[2]))

    source[0] = _MARK.sub(generate, source[0])


# Commands


def command_lines() -> Iterator[str]:
    """Yield Markdown: a section for each command."""
    from cairn.cli import app

    group: Any = typer.main.get_command(app)
    root = typer.Context(group, info_name="cairn")
    for name, command in group.commands.items():
        if not command.hidden:
            yield from _command(command, typer.Context(command, info_name=name, parent=root))


def _command(command: Any, context: Any) -> Iterator[str]:
    words, *example = _RICH.split(inspect.cleandoc(command.help or ""))
    yield from [f"## cairn {context.info_name}", "", words.strip(), ""]
    yield from [
        "```text",
        f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}",
    ]
    yield from ["```", ""]
    if example:
        yield from ["For example:", "", "```text", example[0].strip(), "```", ""]
    rows = [row for each in command.params if (row := _parameter(each)) is not None]
    if rows:
        yield from ["| argument or option | |", "|---|---|"]
        yield from (f"| {names} | {about} |" for names, about in rows)
        yield ""


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _argument(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name.upper())
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _parameter(parameter: Any) -> tuple[str, str] | None:
    if getattr(parameter, "hidden", False):
        return None
    about = _RICH.sub("", getattr(parameter, "help", None) or "")
    if _is_option(parameter):
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        default = parameter.default
        if not parameter.is_flag and default not in (None, "", ()) and not callable(default):
            about += f" Default: `{default}`."
        if parameter.required:
            about += " Required."
    else:
        names = f"`{_argument(parameter)}`"
    return names, about.strip().replace("|", "\\|").replace("\n", " ")


# Names


def public_names(module: Any) -> list[str]:
    """Return the exports of a module; without a list, the classes and functions it defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [name for name in listed if not inspect.ismodule(getattr(module, name))]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def name_lines(module_name: str) -> Iterator[str]:
    """Yield Markdown with autodoc's directives: functions and classes, then errors."""
    module = importlib.import_module(module_name)
    names = sorted(public_names(module), key=_place)
    errors = [n for n in names if n.endswith("Error") or n == "SimulatedCrash"]
    yield "```{eval-rst}"
    for name in [*(n for n in names if n not in errors), *errors]:
        value = getattr(module, name)
        if inspect.isclass(value):
            yield f".. autoclass:: {module_name}.{name}"
            if name not in errors:
                yield "   :members:"
        elif inspect.isfunction(value):
            yield f".. autofunction:: {module_name}.{name}"
        else:
            # Autodoc would show an alias with the docstring of its target.
            yield from [f".. py:data:: {module_name}.{name}", "", f"   ``{value}``"]
        yield ""
    yield "```"


def _place(name: str) -> int:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


# Docstrings


def _without_protocol(
    app: Any, what: str, name: str, value: Any, options: Any, signature: Any, returned: Any
) -> Any:
    """Return no signature for a protocol, which is never called."""
    return ("", None) if getattr(value, "_is_protocol", False) else None


def _as_rst(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    lines[:] = list(docstring_lines(lines))


def docstring_lines(lines: list[str]) -> Iterator[str]:
    """Yield plain text as reStructuredText: programs become blocks, other markup is escaped."""
    before, in_program = "", False
    for line in lines:
        is_indented = line.startswith("    ")
        if is_indented and not before.strip() and not in_program:
            yield from [".. code-block:: python", ""]
            in_program = True
        elif line.strip() and not is_indented:
            in_program = False
        yield line if in_program else _escape(line)
        before = line


def _escape(line: str) -> str:
    """Return a line with stars and bars escaped outside of backticks, but not list markers."""
    parts = line.split("`")
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([*|_])(?!\s)", r"\\\1", parts[index])
    for index in range(1, len(parts), 2):
        # A literal takes no escapes, and must not begin or end with a blank.
        parts[index] = f"``{parts[index].strip() or '-'}``"
    if len(parts) % 2 == 0:  # A backtick without another.
        parts[-1] = "\\`" + parts[-1].strip("`")
    return "".join(parts)
