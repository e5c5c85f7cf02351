"""The options of `cairn run` that are passed on to `job.start`.

Names, types and defaults are those of `driver.options.Options`; this table adds the help. A
command takes them all as `**start`, and `add_start_options` gives it the signature that Typer
reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Final, get_args, get_type_hints

import typer

from cairn.cli.serving import serve_settings
from cairn.driver.options import Options

_OPTIONS: Final = {
    "parallelism": typer.Option(
        "--parallelism", "-p", help="Number of subtasks; with --autoscale a range such as 2..16. "
        "Default: the number of Spark's cores."
    ),
    "autoscale": typer.Option(
        help="off, observe or on: change the number of subtasks by load, or only report it."
    ),
    "trigger": typer.Option(
        help='The interval between epochs, such as "1 second"; "available-now" processes the '
        "input that is there and ends."
    ),
    "backend": typer.Option(
        help="Where slots keep state between epochs: heap, rocksdb, or the URL of a database: "
        "postgresql://…, redis://…, or env:NAME of a variable that has it."
    ),
    "backend_memory_mb": typer.Option(
        help="Memory of any other backend than heap, per slot and operator, in MiB."
    ),
    "slot_memory_mb": typer.Option(
        help="Memory that a slot may use before it is reported, in MiB. Default on a cluster: its "
        "share of the executor's memory beside the heap."
    ),
    "savepoint": typer.Option(help="Start an empty checkpoint from this savepoint."),
    "reset_sources": typer.Option(
        "--reset-source", help="Read this source from its beginning. Can be repeated."
    ),
    "retained_epochs": typer.Option(help="Keep at least this many epochs."),
    "retained_for": typer.Option(help='Also keep epochs younger than this, such as "7 days".'),
    "on_stop": typer.Option(help="retain or delete the checkpoint when the run ends."),
    "spark_checkpoint": typer.Option(
        help="Where Spark keeps its own log, if not in the checkpoint."
    ),
    "drain": typer.Option("--drain", help="With available-now: fire every timer at the end."),
    "on_error": typer.Option(
        help="fail, or dead-letter: set aside the rows that a function fails on."
    ),
    "guarantee": typer.Option(help="exactly-once, at-least-once or at-most-once."),
    "checkpoint_every": typer.Option(help="Batches per epoch: the epoch commits after the last."),
    "commit_timeout": typer.Option(
        help='How long a sink may fail to publish, such as "1 hour". Default: no limit.'
    ),
    "allow_dropped_state": typer.Option(
        "--allow-dropped-state",
        help="Start although the job lacks operators, states or sources of the checkpoint. "
        "Their state is dropped.",
    ),
    "allow_dropped_output": typer.Option(
        "--allow-dropped-output",
        help="Start although a sink that was removed, or that has a new target, may not have "
        "published the newest epoch. That output is dropped.",
    ),
    "serve": typer.Option(
        metavar="[HOST:]PORT",
        help="Serve the dashboard and the state at this address; 0 picks a free port. "
        "Tokens come from CAIRN_TOKEN and CAIRN_CONTROL_TOKEN in the environment.",
    ),
    "ha": typer.Option(
        metavar="URL",
        help="Wait until this process leads the group, such as store:, zookeeper://host:2181/path "
        "or kubernetes:lease/NAME; others with the same URL wait meanwhile.",
    ),
    "standby": typer.Option(
        help="While this process waits for the lead: warm keeps Spark and the slots running, hot "
        "also keeps the state of the newest epoch in them."
    ),
    "restart": typer.Option(
        help='When a run that failed begins again: "none", "fixed(3, 10 seconds)", '
        '"exponential(1 second, 5 minutes)" or "rate(5 per 10 minutes)".'
    ),
}  # fmt: skip
_DEFAULTS: Final = {"reset_sources": None, "restart": "exponential(1 second, 5 minutes)"}
"""Defaults of the command line that differ from those of `job.start`."""


def add_start_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `**start` of a command by one parameter per option."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.name != "start"]
    hints = get_type_hints(Options)
    added = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_DEFAULTS.get(field.name, field.default),
            annotation=Annotated[_cli_type(hints[field.name], field.default), _OPTIONS[field.name]],
        )
        for field in fields(Options)
        if field.name in _OPTIONS
    ]
    command.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in own + added}
    return command


def make_options(checkpoint: str, start: dict[str, Any]) -> Options:
    """Return the options for `job.start` from the values of a command line."""
    serve = start["serve"]
    return Options(
        **{
            **start,
            "checkpoint": checkpoint,
            "reset_sources": tuple(start["reset_sources"] or ()),
            "serve": None if serve is None else serve_settings(serve),
        }
    )


def _cli_type(hint: Any, default: object) -> Any:
    """Return the type in which Typer reads an option: text, unless it is a number or a flag."""
    if isinstance(default, tuple):
        return list[str] | None
    if {int, str} <= set(get_args(hint)):
        return str | None
    for kind in (bool, int):
        if hint is kind or kind in get_args(hint):
            return kind | None if default is None else kind
    return str | None if default is None else str
