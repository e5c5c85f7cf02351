"""Commands that only read a checkpoint: dashboard, ls, show, leader, verify, diff, state."""

from __future__ import annotations

from typing import Annotated

import typer

from cairn.cli.arguments import AnyCheckpoint, AsJson, Checkpoint, SparkCheckpoint
from cairn.cli.failure import FAILED


def dashboard(
    checkpoint: Checkpoint,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Where to serve it. Default: a free port of this machine. If CAIRN_TOKEN is set "
            "in the environment, clients need that token.",
        ),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Show a job in a browser, whether it runs or not: epochs, state, errors. Read-only.

    [dim]cairn dashboard ckpt --open[/dim]
    """
    from cairn.cli.serving import show_dashboard

    show_dashboard(checkpoint, address, is_opened=is_opened)


def ls(
    checkpoint: Checkpoint,
    everything: Annotated[
        bool, typer.Option("--all", help="List every record: takeovers and restores too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the status of a job, and list its epochs, newest first.

    Rows and delta belong to the epoch; keys, entries and state are totals after it.

    Keys are those that hold state. An entry is a stored row: one per key of a state, and one
    per entry of a map.

    [dim]cairn ls ckpt[/dim]
    """
    from cairn.cli.checkpoint import open_checkpoint
    from cairn.cli.tables import print_epochs, print_json
    from cairn.query.epochs import list_epochs

    found = list_epochs(open_checkpoint(checkpoint), everything=everything)
    print_json(found) if as_json else print_epochs(found, everything=everything)


def show(
    checkpoint: Checkpoint,
    epoch: Annotated[
        int | None, typer.Argument(help="The number of the epoch. Default: the newest.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the status of a job and one epoch: sources, operators, state, files, times.

    The exit code is 1 if no epoch is committed yet.

    [dim]cairn show ckpt 42[/dim]
    """
    from cairn.cli.checkpoint import open_checkpoint
    from cairn.cli.show import print_epoch, print_epoch_json, read_epoch

    shown = read_epoch(open_checkpoint(checkpoint), epoch)
    print_epoch_json(shown) if as_json else print_epoch(shown)
    if shown.epoch is None:
        raise typer.Exit(FAILED)


def leader(
    checkpoint: Checkpoint,
    ha: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The group, as for cairn run. Default: the one that the leader has noted.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show who leads a job, since when and where, and which drivers wait.

    With store: and Kubernetes it watches the records of the drivers for up to a lease. Secrets of
    ZooKeeper come from the environment. The exit code is 1 if nobody leads.

    [dim]cairn leader ckpt[/dim]
    """
    from cairn.cli.checkpoint import open_checkpoint
    from cairn.cli.leading import print_lead
    from cairn.cli.tables import print_json
    from cairn.query.leading import read_lead
    from cairn.report.status import ACTIVE

    found = read_lead(open_checkpoint(checkpoint), ha)
    print_json(found) if as_json else print_lead(found)
    is_led = found.health.status in ACTIVE if found.group is None else found.group.leader
    if not is_led:
        raise typer.Exit(FAILED)


def verify(
    checkpoint: AnyCheckpoint,
    spark_checkpoint: SparkCheckpoint = None,
    as_json: AsJson = False,
) -> None:
    """Read and check every file of a checkpoint, branch or savepoint.

    The exit code is 1 if a file is damaged or missing.

    [dim]cairn verify ckpt[/dim]
    """
    from cairn.cli.checkpoint import check
    from cairn.cli.tables import print_check, print_json, progress_bar

    with progress_bar("checking") as progress:
        report = check(checkpoint, progress, spark_checkpoint=spark_checkpoint)
    print_json(report) if as_json else print_check(report)
    if not report.ok:
        raise typer.Exit(FAILED)


def diff(
    checkpoint: Checkpoint,
    before: Annotated[int, typer.Argument(metavar="A", help="The number of an epoch.")],
    after: Annotated[int, typer.Argument(metavar="B", help="The epoch to compare it with.")],
    operator: Annotated[str | None, typer.Option(help="Only this operator, by its uid.")] = None,
    state: Annotated[str | None, typer.Option(help="Only this state.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Examples of each kind, per state.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Compare the state of two epochs: keys added, changed and removed.

    [dim]cairn diff ckpt 41 42 --operator score[/dim]
    """
    from cairn.cli.diff import diff_facts, print_diff
    from cairn.cli.tables import print_json

    facts = diff_facts(checkpoint, before, after, operator=operator, state=state, limit=limit)
    print_json(facts) if as_json else print_diff(facts)


def state(
    checkpoint: AnyCheckpoint,
    operator: Annotated[str | None, typer.Argument(help="The uid of an operator.")] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="STATE", help="The name of a state of the operator.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Only this key: alice or 42; with several columns '[\"alice\", 42]'."),
    ] = None,
    sql: Annotated[
        str | None, typer.Option(help='A query, such as "select * from operator.state limit 5".')
    ] = None,
    epoch: Annotated[int | None, typer.Option(help="An epoch. Default: the newest.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of rows; 0 prints all. Default: 20, or all with --json and --csv.",
        ),
    ] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print rows as CSV.")] = False,
) -> None:
    """Read the state of an epoch, whether the job runs or not.

    Without OPERATOR and STATE it lists both; with them it prints rows. --sql runs any query.

    [dim]cairn state ckpt score total --key alice[/dim]
    """
    from cairn.cli.state import Asked, show_state

    show_state(
        Asked(
            checkpoint=checkpoint,
            operator=operator,
            state=name,
            key=key,
            sql=sql,
            epoch=epoch,
            limit=limit,
            form="json" if as_json else "csv" if as_csv else "text",
        ),
        is_twice=as_json and as_csv,
    )
