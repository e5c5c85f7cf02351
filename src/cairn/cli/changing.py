"""Change a checkpoint as a whole: what `rollback`, `branch` and `rm` of `change_commands` do.

Always true here:
- before a change that cannot be undone, it is described and confirmed; `--yes` confirms it;
- where nobody can answer and `--yes` is missing, nothing is done.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import typer
from rich.text import Text

from cairn.backends.files import drop_external
from cairn.cli.checkpoint import open_checkpoint, open_folder, split_epoch
from cairn.cli.job_file import UsageError
from cairn.cli.tables import many, print_json, seconds_since, stdout_console, when
from cairn.report.text import age, count, duration, size
from cairn.snapshots.branch import branch
from cairn.snapshots.rollback import RollbackPlan, plan_rollback, rollback
from cairn.storage.removal import (
    branches_of,
    delete_checkpoint,
    delete_savepoint,
    is_being_removed,
    is_savepoint,
)
from cairn.storage.store import Store, open_store

Facts = dict[str, Any]

EPOCHS_SHOWN_MAX = 6


def roll_back(checkpoint: str, epoch: int, *, yes: bool, as_json: bool) -> None:
    store = open_checkpoint(checkpoint)
    plan = plan_rollback(store, epoch)
    if not as_json:
        _print_plan(plan)
    _confirm("Roll back?", yes=yes, as_json=as_json)
    restore = rollback(store, epoch)
    facts = {**_plan_facts(plan), "record": restore.number}
    if as_json:
        print_json(facts)
    else:
        said = f"epoch {epoch} is the newest one (record {restore.number}); the next start "
        _print_done("rolled back: ", f"{said}goes on from there")


def make_branch(
    checkpoint: str,
    new: str,
    *,
    spark_checkpoint: str | None,
    new_spark_checkpoint: str | None,
    as_json: bool,
) -> None:
    url, epoch = split_epoch(checkpoint)
    info = branch(
        open_checkpoint(url),
        epoch,
        new,
        spark_store=None if spark_checkpoint is None else open_folder(spark_checkpoint),
        spark_dest=None if new_spark_checkpoint is None else open_store(new_spark_checkpoint),
    )
    if as_json:
        print_json(info._asdict())
        return
    _print_done("branched: ", f"epoch {info.parent_epoch} is epoch {info.epoch} of {info.url}")
    console = stdout_console()
    shared = f"{many(info.objects, 'object')} ({size(info.bytes)}) shared, nothing copied"
    console.print(f"  {shared}")
    said = "  next: start a job with this checkpoint, and with sinks that write elsewhere"
    console.print(Text(said, "dim"), soft_wrap=True)


def remove(checkpoint: str, *, yes: bool, force: bool, as_json: bool) -> None:
    store = open_folder(checkpoint)
    saved = is_savepoint(store)
    if not saved and not is_being_removed(store):
        store = open_checkpoint(checkpoint)
    what = "savepoint" if saved else "checkpoint"
    branches = {} if saved or force else branches_of(store)
    if not as_json and not branches:
        _print_removal(store, what, force=force)
    if not branches:  # Otherwise it is refused anyway.
        _confirm("Remove it?", yes=yes, as_json=as_json)
    if saved:
        removed = delete_savepoint(store)
    else:
        removed = delete_checkpoint(store, force=force, clean=drop_external)
    if as_json:
        print_json({"removed": store.url, "kind": what, **removed._asdict()})
        return
    _print_done("removed: ", f"{many(removed.objects, 'object')}, {size(removed.bytes)}")
    for line in removed.unreleased:
        said = (
            f"a hold or state may be left in {line}\n"
            "  next: `cairn verify` there lists the holds to delete; drop the schema of a database"
        )
        stdout_console().print(Text(said, "yellow"), soft_wrap=True)


def _print_plan(plan: RollbackPlan) -> None:
    first_ms, last_ms = plan.span_ms
    lines = [Text(f"rolling back {plan.url} from epoch {plan.newest} to {plan.epoch}", "bold")]
    if plan.undone:
        undone = _epochs([epoch.epoch for epoch in plan.undone])
        lines += [
            Text(f"  undone    {undone}; {many(plan.rows, 'row')} in"),
            Text(f"  committed {when(first_ms)} to {when(last_ms)},"),
            Text(f"            the last {age(seconds_since(last_ms))} ago"),
        ]
    else:
        lines.append(Text("  undone    nothing"))
    if plan.regained:
        lines.append(Text(f"  regained  {_epochs(plan.regained)}"))
    for uid, epochs in plan.output.items():
        said = f"{many(sum(epochs.values()), 'committable')} of {_epochs(list(epochs))}"
        lines.append(Text(f"  published {uid}: {said}", "yellow"))
    for index, offset in enumerate(plan.offsets):
        name = plan.sources[index] if index < len(plan.sources) else str(index)
        lines.append(Text(f"  replayed  source {name} after {offset}"))
    if plan.output:
        again = "  what is published stays; the replay publishes it again, under new epochs"
        lines.append(Text(again, "yellow"))
    lines.append(Text("  a job that runs on this checkpoint is stopped by it", "yellow"))
    stdout_console().print(*lines, sep="\n", soft_wrap=True)


def _epochs(numbers: list[int]) -> str:
    """Newest first."""
    word = "epoch" if len(numbers) == 1 else f"{count(len(numbers))} epochs:"
    shown = ", ".join(map(str, numbers[:EPOCHS_SHOWN_MAX]))
    more = f", … {numbers[-1]}" if len(numbers) > EPOCHS_SHOWN_MAX else ""
    return f"{word} {shown}{more}"


def _plan_facts(plan: RollbackPlan) -> Facts:
    facts: Facts = msgspec.to_builtins(plan._asdict())
    facts["undone"] = [undone._asdict() for undone in plan.undone]
    first_ms, last_ms = plan.span_ms
    return {
        **facts,
        "rows": plan.rows,
        "first_ms": first_ms,
        "last_ms": last_ms,
        "output": {
            uid: [{"epoch": epoch, "committables": n} for epoch, n in epochs.items()]
            for uid, epochs in plan.output.items()
        },
    }


def _print_removal(store: Store, what: str, *, force: bool) -> None:
    found = store.list()
    newest_s = seconds_since(round(max((o.modified_s for o in found), default=0.0) * 1000))
    said = f"{many(len(found), 'object')}, {size(sum(o.size for o in found))}"
    console = stdout_console()
    console.print(Text(f"removing the {what} at {store.url}", "bold"), soft_wrap=True)
    console.print(f"  {said}, last written {duration(newest_s)} ago")
    if what == "checkpoint":
        console.print(Text("  a job that runs on it is stopped", "yellow"))
    if force:
        console.print(Text("  branches of it, if there are any, lose their state", "yellow"))


def _confirm(question: str, *, yes: bool, as_json: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "this command asks for confirmation, and stdin is not a terminal\n"
            "  nothing was done\n"
            "  next: pass --yes"
        )
    typer.confirm(question, abort=True, err=as_json)


def _print_done(title: str, said: str) -> None:
    text = Text.assemble((title, "bold green"), said)
    stdout_console().print(text, soft_wrap=True)
