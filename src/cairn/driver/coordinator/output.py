"""Choose the sinks that publish the newest epoch again at a start.

Each epoch records the targets of its output (`Epoch.targets`). The program that starts may have
a sink of the same uid with another target, or none.

Always true here:
- a sink publishes only output that was prepared for its own target;
- output that is not known to be published is dropped only with `allow_dropped_output`, or if it
  ends with the driver (`sinks.Collect`, `sinks.Console`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cairn.errors import PlanError
from cairn.logs import logger
from cairn.sinks.base import Sink
from cairn.storage.manifest import Epoch


class Output(NamedTuple):
    """The output of an epoch, compared with the sinks of a program."""

    sinks: frozenset[str]
    """Sinks that publish it, even if they have before."""
    is_whole: bool
    """True if the output of all other sinks is known to be published."""


def targets_of(sinks: Mapping[str, Sink], epoch_sinks: Mapping[str, object]) -> dict[str, str]:
    """Return the targets of the sinks that have prepared output."""
    return {uid: sinks[uid].target for uid, prepared in epoch_sinks.items() if prepared}


def check_output(
    epoch: Epoch,
    sinks: Mapping[str, Sink],
    *,
    is_published: Callable[[], bool],
    allow_dropped_output: bool,
) -> Output:
    """Compare an epoch's output with a program. PlanError if some of it would be lost.

    `is_published` returns whether the whole epoch is known to be published.
    """
    ours, others = set(), []
    for uid, prepared in epoch.committables.items():
        sink, target = sinks.get(uid), epoch.targets.get(uid)
        # Epochs of older versions have no targets: the present target is assumed.
        if sink is not None and (not prepared or target is None or target == sink.target):
            ours.add(uid)
        elif prepared:
            others.append(uid)
    if not others or is_published():
        return Output(frozenset(ours), is_whole=True)
    for uid in others:
        if epoch.targets.get(uid) == "":
            continue
        if not allow_dropped_output and uid in epoch.targets:
            raise _would_be_lost(epoch, uid, sinks.get(uid))
        logger.warning(
            "output of sink %r in epoch %d for %s is not published: %s",
            uid, epoch.number, epoch.targets.get(uid, "an unknown target"),
            _describe(sinks.get(uid)),
        )  # fmt: skip
    return Output(frozenset(ours), is_whole=False)


def _would_be_lost(epoch: Epoch, uid: str, sink: Sink | None) -> PlanError:
    target = epoch.targets[uid]
    return PlanError(
        f"sink {uid!r} would lose its output of epoch {epoch.number}, which is not known to be "
        "published\n"
        f"  prepared for: {target}\n"
        f"  found: {_describe(sink)}\n"
        "  next: if a run of this job is active, stop it first; else start the job once more with "
        "the sink as it was, which publishes the epoch, and change it then; or pass "
        "allow_dropped_output=True to give that output up",
        sink=uid,
        epoch=epoch.number,
        expected=target,
        found=None if sink is None else sink.target,
    )


def _describe(sink: Sink | None) -> str:
    if sink is None:
        return "the program has no such sink"
    return f"the program publishes to {sink.target or 'the driver'}"
