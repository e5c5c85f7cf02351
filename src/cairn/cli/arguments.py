"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Checkpoint = Annotated[str, typer.Argument(help="The checkpoint: a folder or an object store URL.")]
AnyCheckpoint = Annotated[
    str,
    typer.Argument(help="The checkpoint, branch or savepoint: a folder or a URL."),
]
CheckpointAtEpoch = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT[@EPOCH]", help="The checkpoint and the epoch. Default: the newest."
    ),
]
SparkCheckpoint = Annotated[
    str | None,
    typer.Option(help="Where the job keeps Spark's own log, if not in the checkpoint."),
]
Target = Annotated[
    str, typer.Argument(metavar="JOB.PY:BUILD", help="A file and its build(spark, *args).")
]
TargetArgs = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments for BUILD.")
]
Conf = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A Spark setting. Can be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
