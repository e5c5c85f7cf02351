"""The command `cairn`: its list of commands, and `--debug` for each of them.

Always true here:
- a command on a checkpoint does not import pyspark; one that only reads changes nothing;
- `--json` prints the same facts as the view for people, under stable names.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

import cairn
from cairn.cli import change_commands, look_commands, run_commands
from cairn.cli.arguments import Debug
from cairn.cli.failure import report_errors

_COMMANDS: Final[dict[str, tuple[Callable[..., None], ...]]] = {
    "Run a job": (
        run_commands.new,
        run_commands.run,
        change_commands.handover,
        run_commands.explain,
        run_commands.demo,
    ),
    "Change a job that runs": (change_commands.rebalance,),
    "Look at a checkpoint, whether its job runs or not": (
        look_commands.dashboard,
        look_commands.ls,
        look_commands.show,
        look_commands.leader,
        look_commands.verify,
        look_commands.diff,
        look_commands.state,
    ),
    "Save, go back, branch, remove": (
        change_commands.rollback,
        change_commands.branch,
        change_commands.rm,
        change_commands.savepoint,
    ),
}

app = typer.Typer(
    name="cairn",
    help="Managed state for PySpark: Spark moves the data, cairn keeps the state.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda is_given: _print_version() if is_given else None,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    pass


def _print_version() -> None:
    typer.echo(f"cairn {cairn.__version__}")
    raise typer.Exit


def _add_debug(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with `--debug`, and with its errors printed for people."""

    @functools.wraps(command)
    def run(*, debug: bool = False, **given: Any) -> None:
        with report_errors(debug=debug):
            command(**given)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter(
        "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug
    )
    parameters = [*signature.parameters.values(), option]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_add_debug(_command))


def main(argv: list[str] | None = None) -> None:
    """Run a command; the entry point `cairn`."""
    app(args=sys.argv[1:] if argv is None else argv, prog_name="cairn")
