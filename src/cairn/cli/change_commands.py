"""Commands that change something: savepoint, rollback, branch, rm, handover, rebalance."""

from __future__ import annotations

from typing import Annotated

import typer

from cairn.cli.arguments import (
    AnyCheckpoint,
    AsJson,
    Checkpoint,
    CheckpointAtEpoch,
    SparkCheckpoint,
    Yes,
)


def savepoint(
    source: CheckpointAtEpoch,
    dest: Annotated[str, typer.Argument(help="An empty folder, or an object store URL.")],
    spark_checkpoint: SparkCheckpoint = None,
    as_json: AsJson = False,
) -> None:
    """Write an epoch to its own folder, in Parquet, whether the job runs or not.

    A job can start from it, with any parallelism and in any other checkpoint.

    [dim]cairn savepoint ckpt@42 savepoints/friday[/dim]
    """
    from cairn.cli.savepoint import print_saved, save
    from cairn.cli.tables import print_json, progress_bar

    with progress_bar("saving key groups") as progress:
        facts = save(source, dest, progress, spark_checkpoint=spark_checkpoint)
    print_json(facts) if as_json else print_saved(facts)


def rollback(
    checkpoint: Checkpoint,
    epoch: Annotated[int, typer.Argument(help="The epoch to go back to.")],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Go back to an earlier epoch: the next start replays the input from there.

    Before it asks, it lists what is undone, and which published output stays.

    [dim]cairn rollback ckpt 42[/dim]
    """
    from cairn.cli.changing import roll_back

    roll_back(checkpoint, epoch, yes=yes, as_json=as_json)


def branch(
    checkpoint: CheckpointAtEpoch,
    new: Annotated[str, typer.Argument(help="The new checkpoint: an empty folder or URL.")],
    spark_checkpoint: SparkCheckpoint = None,
    new_spark_checkpoint: Annotated[
        str | None,
        typer.Option(help="Where the new job will keep Spark's own log, if not in NEW."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a second job that starts from an epoch, without copying state.

    The first job continues undisturbed, and keeps the files that both need.

    [dim]cairn branch ckpt@42 experiment[/dim]
    """
    from cairn.cli.changing import make_branch

    make_branch(
        checkpoint,
        new,
        spark_checkpoint=spark_checkpoint,
        new_spark_checkpoint=new_spark_checkpoint,
        as_json=as_json,
    )


def rebalance(
    url: Annotated[str, typer.Argument(help="The address of a run that was started with serve=.")],
    control_token: Annotated[
        str,
        typer.Option(
            envvar="CAIRN_CONTROL_TOKEN", help="The control token of the run.", show_default=False
        ),
    ],
    token: Annotated[
        str | None,
        typer.Option(envvar="CAIRN_TOKEN", help="The token for reading.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Cut the ranges of key groups by their load, while the job runs.

    Subtasks then carry equal load. It names the key group that limits this, if one does.

    [dim]cairn rebalance http://10.0.0.7:8080[/dim]
    """
    from cairn.cli.tables import print_json
    from cairn.client import client

    with client(url, token, control_token=control_token) as job:
        balance = job.rebalance()
    print_json(balance) if as_json else typer.echo(balance.text())


def handover(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL...", help="The HTTP addresses of the run, or of all drivers of its group."
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="The standby: its host or identity. Default: a hot one, or any."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the takeover.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Pass the lead of a running job to a standby, after the current epoch.

    Tokens come from CAIRN_TOKEN and CAIRN_CONTROL_TOKEN in the environment.

    [dim]cairn handover http://a:8080 http://b:8080 --to b[/dim]
    """
    from cairn.cli.leading import hand_over

    hand_over(urls, to=to, timeout_s=timeout, as_json=as_json)


def rm(
    checkpoint: AnyCheckpoint,
    yes: Yes = False,
    force: Annotated[
        bool, typer.Option("--force", help="Remove it even if branches need it: they lose state.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a checkpoint or a savepoint with everything in it.

    [dim]cairn rm experiment[/dim]
    """
    from cairn.cli.changing import remove

    remove(checkpoint, yes=yes, force=force, as_json=as_json)
