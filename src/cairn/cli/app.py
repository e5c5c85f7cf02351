"""The commands, their options and their help.

Always true here:
- a command on a checkpoint does not import pyspark; one that only looks changes nothing;
- `--json` prints the same facts as the view for people, under stable names.
"""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

import cairn
from cairn.cli.failure import FAILED, reported

app = typer.Typer(
    name="cairn",
    help="Managed state for PySpark: Spark moves the data, cairn keeps the state.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The command list, in parts.
RUN = "Run a job"
LOOK = "Look at a checkpoint, whether its job runs or not"
CHANGE = "Save, go back, branch, remove"

Checkpoint = Annotated[str, typer.Argument(help="The checkpoint: a folder or an object store url.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"cairn {cairn.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel=RUN)
def new(
    folder: Annotated[
        str, typer.Argument(metavar="NAME", help="A new folder; the job gets its name.")
    ],
    debug: Debug = False,
) -> None:
    """Write a small job that runs, with a test of its function, as a project to begin with.

    [dim]cairn new payments[/dim]
    """
    from cairn.cli.starting import write_project

    with reported(debug=debug):
        for file in write_project(folder):
            typer.echo(f"wrote {file}")
        typer.echo(f"next: cd {shlex.quote(folder)} && python job.py")


@app.command(rich_help_panel=RUN)
def run(
    target: Annotated[
        str, typer.Argument(metavar="JOB.PY:BUILD", help="A file and its build(spark, *args).")
    ],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", "-c", help="Where epochs and state are kept.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="Passed on to BUILD.")
    ] = None,
    parallelism: Annotated[
        int | None, typer.Option("--parallelism", "-p", help="Subtasks; default: Spark's cores.")
    ] = None,
    trigger: Annotated[
        str, typer.Option(help='Between epochs: "1 second"; or "available-now" and end.')
    ] = "1 second",
    master: Annotated[str | None, typer.Option(help="Spark's master, such as local[2].")] = None,
    conf: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A Spark setting; repeat it.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="Where slots keep state between epochs: heap or rocksdb.")
    ] = "heap",
    backend_memory_mb: Annotated[
        int, typer.Option(help="Memory of a RocksDB backend, per slot and operator.")
    ] = 512,
    savepoint: Annotated[
        str | None, typer.Option(help="Start an empty checkpoint from this savepoint.")
    ] = None,
    reset_source: Annotated[
        list[str] | None, typer.Option(help="Read this source from its beginning; repeat it.")
    ] = None,
    retained_epochs: Annotated[int, typer.Option(help="Epochs to keep, at least.")] = 10,
    retained_for: Annotated[
        str | None, typer.Option(help='Keep epochs younger than this too: "7 days".')
    ] = None,
    on_stop: Annotated[
        str, typer.Option(help="retain or delete the checkpoint when the run ends.")
    ] = "retain",
    spark_checkpoint: Annotated[
        str | None, typer.Option(help="Where Spark keeps its own log, if not in the checkpoint.")
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="With available-now: at the end, fire every timer.")
    ] = False,
    on_error: Annotated[
        str, typer.Option(help="fail, or dead-letter: put rows aside that a function fails on.")
    ] = "fail",
    guarantee: Annotated[
        str, typer.Option(help="exactly-once, at-least-once or at-most-once.")
    ] = "exactly-once",
    checkpoint_every: Annotated[
        int, typer.Option(help="Batches of an epoch: it is committed after the last.")
    ] = 1,
    commit_timeout: Annotated[
        str | None,
        typer.Option(help='How long a sink may fail to publish: "1 hour". Default: for ever.'),
    ] = None,
    allow_dropped_state: Annotated[
        bool,
        typer.Option(
            "--allow-dropped-state",
            help="Start although the job lacks operators, states or sources of the checkpoint; "
            "what they hold is dropped.",
        ),
    ] = False,
    allow_dropped_output: Annotated[
        bool,
        typer.Option(
            "--allow-dropped-output",
            help="Start even if a sink that is gone, or has another target, may not have "
            "published the newest epoch; that output is dropped.",
        ),
    ] = False,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve a dashboard and the state there; 0: any free port. "
            "Tokens: CAIRN_TOKEN, CAIRN_CONTROL_TOKEN in the environment.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per epoch on stdout; logs on stderr.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run a job, from its newest epoch if the checkpoint has one.

    Ctrl-C ends it after the epoch under way; the same command goes on from there.

    [dim]cairn run job.py:build --checkpoint ckpt --parallelism 2[/dim]
    """
    from cairn.cli.driving import Settings, drive
    from cairn.cli.serving import serve_settings

    with reported(debug=debug):
        drive(
            Settings(
                target=target,
                checkpoint=checkpoint,
                args=list(args or []),
                parallelism=parallelism,
                trigger=trigger,
                master=master,
                conf=list(conf or []),
                start={
                    "backend": backend,
                    "backend_memory_mb": backend_memory_mb,
                    "savepoint": savepoint,
                    "reset_sources": tuple(reset_source or ()),
                    "retained_epochs": retained_epochs,
                    "retained_for": retained_for,
                    "on_stop": on_stop,
                    "spark_checkpoint": spark_checkpoint,
                    "allow_dropped_state": allow_dropped_state,
                    "allow_dropped_output": allow_dropped_output,
                    "drain": drain,
                    "on_error": on_error,
                    "guarantee": guarantee,
                    "checkpoint_every": checkpoint_every,
                    "commit_timeout": commit_timeout,
                    "serve": None if serve is None else serve_settings(serve),
                },
                as_json=as_json,
            )
        )


@app.command(rich_help_panel=RUN)
def explain(
    target: Annotated[
        str, typer.Argument(metavar="JOB.PY:BUILD", help="A file and its build(spark, *args).")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="Passed on to BUILD.")
    ] = None,
    svg: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw it, into this file.")
    ] = None,
    master: Annotated[str, typer.Option(help="Spark's master; nothing runs on it.")] = "local[1]",
    conf: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A Spark setting; repeat it.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the graph of a job: stages, operators, states, shuffles, chains. Nothing is started.

    [dim]cairn explain job.py:build --svg job.svg[/dim]
    """
    from cairn.cli.explaining import explain_job

    with reported(debug=debug):
        explain_job(
            target, list(args or []), svg=svg, as_json=as_json, master=master, conf=list(conf or [])
        )


@app.command(rich_help_panel=LOOK)
def dashboard(
    checkpoint: Checkpoint,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Where to serve it; default: any free port of this machine. "
            "With CAIRN_TOKEN in the environment, only to who brings that.",
        ),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    debug: Debug = False,
) -> None:
    """Look at a job in a browser, whether it runs or not: epochs, state, errors. Only to read.

    [dim]cairn dashboard ckpt --open[/dim]
    """
    from cairn.cli.serving import show_dashboard

    with reported(debug=debug):
        show_dashboard(checkpoint, address, is_opened=is_opened)


@app.command(rich_help_panel=LOOK)
def ls(
    checkpoint: Checkpoint,
    everything: Annotated[
        bool, typer.Option("--all", help="Every record: takeovers and restores too.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the status of a job, and list its epochs, newest first.

    Rows and delta are those of the epoch; keys, entries and state are totals after it.

    Keys are those that hold state. An entry is a stored row: one per key of a state, and one
    per entry of a map.

    [dim]cairn ls ckpt[/dim]
    """
    from cairn.cli.checkpoint import open_checkpoint
    from cairn.cli.tables import print_epochs, print_json
    from cairn.query.epochs import list_epochs

    with reported(debug=debug):
        found = list_epochs(open_checkpoint(checkpoint), everything=everything)
        print_json(found) if as_json else print_epochs(found, everything=everything)


@app.command(rich_help_panel=LOOK)
def show(
    checkpoint: Checkpoint,
    epoch: Annotated[
        int | None, typer.Argument(help="Its number; default: the newest epoch.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the status of a job and one epoch: sources, operators, state, files, times.

    Exit code 1 when no epoch is committed yet.

    [dim]cairn show ckpt 42[/dim]
    """
    from cairn.cli.checkpoint import open_checkpoint
    from cairn.cli.show import print_epoch, print_epoch_json, read_epoch

    with reported(debug=debug):
        shown = read_epoch(open_checkpoint(checkpoint), epoch)
        print_epoch_json(shown) if as_json else print_epoch(shown)
        if shown.epoch is None:
            raise typer.Exit(FAILED)


@app.command(rich_help_panel=LOOK)
def verify(
    checkpoint: Checkpoint,
    spark_checkpoint: Annotated[
        str | None, typer.Option(help="Where the job keeps Spark's own log, if elsewhere.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Read every file of a checkpoint, branch or savepoint. Exit code 1 when there is damage.

    [dim]cairn verify ckpt[/dim]
    """
    from cairn.cli.checkpoint import check
    from cairn.cli.tables import print_check, print_json, progress_bar

    with reported(debug=debug):
        with progress_bar("checking") as progress:
            report = check(checkpoint, progress, spark_checkpoint=spark_checkpoint)
        print_json(report) if as_json else print_check(report)
        if not report.ok:
            raise typer.Exit(FAILED)


@app.command(rich_help_panel=CHANGE)
def rollback(
    checkpoint: Checkpoint,
    epoch: Annotated[int, typer.Argument(help="The epoch to go back to.")],
    yes: Yes = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Go back to an earlier epoch: the next start replays input from there.

    Says first what is undone, and which published output stays.

    [dim]cairn rollback ckpt 42[/dim]
    """
    from cairn.cli.history import roll_back

    with reported(debug=debug):
        roll_back(checkpoint, epoch, yes=yes, as_json=as_json)


@app.command(rich_help_panel=CHANGE)
def branch(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT[@EPOCH]", help="Of which epoch; default: newest.")
    ],
    new: Annotated[str, typer.Argument(help="The new checkpoint: an empty folder or url.")],
    spark_checkpoint: Annotated[
        str | None, typer.Option(help="Where the job keeps Spark's own log, if elsewhere.")
    ] = None,
    new_spark_checkpoint: Annotated[
        str | None, typer.Option(help="Where the new job will keep it, if elsewhere.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a second job that starts from an epoch, without copying state.

    The first job goes on undisturbed, and keeps the files that both need.

    [dim]cairn branch ckpt@42 experiment[/dim]
    """
    from cairn.cli.history import make_branch

    with reported(debug=debug):
        make_branch(
            checkpoint,
            new,
            spark_checkpoint=spark_checkpoint,
            new_spark_checkpoint=new_spark_checkpoint,
            as_json=as_json,
        )


@app.command(rich_help_panel=CHANGE)
def rm(
    checkpoint: Annotated[
        str, typer.Argument(help="The checkpoint, branch or savepoint: a folder or a url.")
    ],
    yes: Yes = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even when branches need it: they lose their state.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Remove a checkpoint or a savepoint with everything in it.

    [dim]cairn rm experiment[/dim]
    """
    from cairn.cli.history import remove

    with reported(debug=debug):
        remove(checkpoint, yes=yes, force=force, as_json=as_json)


@app.command(rich_help_panel=RUN)
def demo(
    events: Annotated[int, typer.Option(min=1000, help="Payments to generate.")] = 400_000,
    seconds: Annotated[float, typer.Option(help="Over which they arrive.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of the payments.")] = 7,
    folder: Annotated[
        str | None, typer.Option(help="Where to work; default: a new temporary folder.")
    ] = None,
    tamper: Annotated[
        bool, typer.Option("--tamper", hidden=True, help="Spoil the output before the check.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Kill a slot, then the driver, in mid-epoch; then count every payment. About a minute.

    [dim]cairn demo[/dim]
    """
    from cairn.demo.play import play

    with reported(debug=debug):
        if not play(events=events, seconds=seconds, seed=seed, folder=folder, tamper=tamper):
            raise typer.Exit(FAILED)


@app.command(rich_help_panel=CHANGE)
def savepoint(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT[@EPOCH]", help="The checkpoint; default: its newest epoch."
        ),
    ],
    dest: Annotated[str, typer.Argument(help="An empty folder, or an object store url.")],
    spark_checkpoint: Annotated[
        str | None, typer.Option(help="Where the job keeps Spark's own log, if elsewhere.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write an epoch to a folder of its own, in Parquet, whether the job runs or not.

    A job can be started from it, with any parallelism and in any other checkpoint.

    [dim]cairn savepoint ckpt@42 savepoints/friday[/dim]
    """
    from cairn.cli.savepoint import print_saved, save
    from cairn.cli.tables import print_json, progress_bar

    with reported(debug=debug):
        with progress_bar("saving key groups") as progress:
            facts = save(source, dest, progress, spark_checkpoint=spark_checkpoint)
        print_json(facts) if as_json else print_saved(facts)


@app.command(rich_help_panel=LOOK)
def diff(
    checkpoint: Checkpoint,
    before: Annotated[int, typer.Argument(metavar="A", help="An epoch, by its number.")],
    after: Annotated[int, typer.Argument(metavar="B", help="The epoch to compare it with.")],
    operator: Annotated[str | None, typer.Option(help="Only this operator, by its uid.")] = None,
    state: Annotated[str | None, typer.Option(help="Only this state.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Examples of each sort, per state.")] = 10,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare the state of two epochs: keys added, changed and removed.

    [dim]cairn diff ckpt 41 42 --operator score[/dim]
    """
    from cairn.cli.diff import diff_facts, print_diff
    from cairn.cli.tables import print_json

    with reported(debug=debug):
        facts = diff_facts(checkpoint, before, after, operator=operator, state=state, limit=limit)
        print_json(facts) if as_json else print_diff(facts)


@app.command(rich_help_panel=LOOK)
def state(
    checkpoint: Annotated[
        str, typer.Argument(help="The checkpoint, branch or savepoint: a folder or a url.")
    ],
    operator: Annotated[str | None, typer.Argument(help="An operator, by its uid.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="STATE", help="A state of it.")] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Only this key: alice, 42; of several columns '[\"alice\", 42]'."),
    ] = None,
    sql: Annotated[
        str | None, typer.Option(help='A query: "select * from operator.state limit 5".')
    ] = None,
    epoch: Annotated[int | None, typer.Option(help="An epoch; default: the newest.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="Rows, 0: all; default: 20 for people, all with --json or --csv."),
    ] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print rows as CSV.")] = False,
    debug: Debug = False,
) -> None:
    """Look into the state of an epoch, whether the job runs or not.

    Alone it lists operators and states; with OPERATOR STATE it shows rows; --sql asks anything.

    [dim]cairn state ckpt score total --key alice[/dim]
    """
    from cairn.cli.state import Asked, show_state

    with reported(debug=debug):
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


def main(argv: list[str] | None = None) -> None:
    """The entry point `cairn`."""
    app(args=sys.argv[1:] if argv is None else argv, prog_name="cairn")
