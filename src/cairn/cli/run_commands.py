"""Commands that run a job, or make one: new, run, explain, demo."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from cairn.cli.arguments import AsJson, Conf, Target, TargetArgs
from cairn.cli.failure import FAILED
from cairn.cli.start_options import add_start_options, make_options


def new(
    folder: Annotated[
        str, typer.Argument(metavar="NAME", help="A new folder; the job gets its name.")
    ],
) -> None:
    """Write a small project to begin with: a job that runs, and a test of its function.

    [dim]cairn new payments[/dim]
    """
    from cairn.cli.starting import write_project

    for file in write_project(folder):
        typer.echo(f"wrote {file}")
    typer.echo(f"next: cd {shlex.quote(folder)} && python job.py")


@add_start_options
def run(
    target: Target,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", "-c", help="Where epochs and state are kept.")
    ],
    args: TargetArgs = None,
    master: Annotated[str | None, typer.Option(help="Spark's master, such as local[2].")] = None,
    conf: Conf = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per epoch; logs go to stderr.")
    ] = False,
    **start: Any,
) -> None:
    """Run a job, from its newest epoch if the checkpoint has one.

    Ctrl-C ends it after the current epoch; the same command continues from there.

    [dim]cairn run job.py:build --checkpoint ckpt --parallelism 2[/dim]
    """
    from cairn.cli.driving import Settings, drive

    drive(
        Settings(
            target=target,
            options=make_options(checkpoint, start),
            args=list(args or []),
            master=master,
            conf=list(conf or []),
            as_json=as_json,
        )
    )


def explain(
    target: Target,
    args: TargetArgs = None,
    svg: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the graph into this file.")
    ] = None,
    master: Annotated[str, typer.Option(help="Spark's master; nothing runs on it.")] = "local[1]",
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Show the graph of a job: stages, operators, states, shuffles, chains. Nothing is started.

    [dim]cairn explain job.py:build --svg job.svg[/dim]
    """
    from cairn.cli.explaining import explain_job

    explain_job(
        target, list(args or []), svg=svg, as_json=as_json, master=master, conf=list(conf or [])
    )


def demo(
    events: Annotated[int, typer.Option(min=1000, help="Payments to generate.")] = 400_000,
    seconds: Annotated[float, typer.Option(help="The time over which they arrive.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Seed of the payments.")] = 7,
    folder: Annotated[
        str | None, typer.Option(help="Where to work. Default: a new temporary folder.")
    ] = None,
    tamper: Annotated[
        bool, typer.Option("--tamper", hidden=True, help="Damage the output before the check.")
    ] = False,
) -> None:
    """Kill a slot and two drivers of a job, then count every payment. About a minute.

    [dim]cairn demo[/dim]
    """
    from cairn.demo.play import play

    if not play(events=events, seconds=seconds, seed=seed, folder=folder, tamper=tamper):
        raise typer.Exit(FAILED)
