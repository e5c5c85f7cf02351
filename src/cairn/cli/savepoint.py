"""Write a savepoint of a checkpoint.

Always true here:
- the checkpoint is unchanged afterwards; while it is read, it has a hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from cairn.cli.checkpoint import open_checkpoint, open_folder, split_epoch
from cairn.cli.job_file import UsageError
from cairn.report.text import count, size
from cairn.snapshots import write_savepoint
from cairn.storage.store import open_store

Facts = dict[str, Any]


def save(
    source: str,
    dest: str,
    progress: Callable[[int, int], None],
    *,
    spark_checkpoint: str | None = None,
) -> Facts:
    url, number = split_epoch(source)
    store = open_checkpoint(url)
    if "://" in dest:
        try:
            open_store(dest)
        except ValueError as error:
            raise UsageError(str(error)) from None
    spark_store = None if spark_checkpoint is None else open_folder(spark_checkpoint)
    info = write_savepoint(store, number, dest, spark_store=spark_store, progress=progress)
    return {
        "checkpoint": store.url,
        "savepoint": open_store(dest).url,
        "id": info.id,
        "job": info.job,
        "epoch": info.epoch,
        "max_parallelism": info.max_parallelism,
        "rows": info.rows,
        "bytes": info.bytes,
        "files": len(info.files),
        "operators": {
            uid: {name: state.rows for name, state in operator.states.items()}
            for uid, operator in info.operators.items()
        },
    }


def print_saved(facts: Facts) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        Text.assemble(
            ("saved: ", "bold green"),
            f"epoch {facts['epoch']} of {facts['job']}, {count(facts['rows'])} rows, "
            f"{size(facts['bytes'])} in {count(facts['files'])} files",
        )
    )
    for uid, states in facts["operators"].items():
        held = ", ".join(f"{name} {count(rows)}" for name, rows in states.items())
        console.print(Text.assemble(f"  {uid}  ", (held, "dim")))
    console.print(Text(facts["savepoint"], "dim"))
