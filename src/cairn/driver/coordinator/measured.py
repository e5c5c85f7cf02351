"""What an epoch measured: into its manifest, and out of it again in figures for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cairn.driver.coordinator.alignment import alignment_ms, level_alignment_ms
from cairn.driver.coordinator.rounds import in_flight
from cairn.metrics import Collected, followed, united
from cairn.protocol.letters import SAMPLE_MAX, LetterSample
from cairn.protocol.messages import Ack, Begin, Compacted, Report
from cairn.protocol.spec import JobSpec
from cairn.slot.heat import hottest
from cairn.storage.manifest import Epoch, Held, operator_uids

_SUMMED = ("rows_in", "rows_out", "late_rows", "untimed_rows", "error_rows")

_STATE = ("entries_changed", "state_keys", "state_entries", "delta_bytes")


def announced(reports: Sequence[Report]) -> list[Compacted]:
    """What slots have written in the background, each file once, older ones first.

    Files are named by content: empty bases of two ranges have one name.
    """
    found = {
        (file.stored.id, file.uid, file.first_group): file
        for report in reports
        for file in report.compacted
    }
    return sorted(found.values(), key=lambda file: (file.as_of, file.uid, file.first_group))


def state_held_of(reports: Sequence[Report]) -> dict[tuple[str, int], Held]:
    """Return how much each operator holds in each subtask."""
    return {
        (uid, report.subtask): held for report in reports for uid, held in report.state_held.items()
    }


def latest(reports: Sequence[Report]) -> list[Report]:
    """One report of each subtask of each level: of a stage that ran twice, the last one counts."""
    found = {(r.level, r.subtask): r for r in sorted(reports, key=lambda r: r.finished_ms)}
    return list(found.values())


def user_of(rounds: Sequence[Sequence[Report]]) -> dict[str, Collected]:
    """Per operator, what its function has counted: of all subtasks, in all rounds."""
    found: dict[str, Collected] = {}
    for reports in rounds:
        counted: dict[str, list[Collected]] = {}
        for report in latest(reports):
            for uid, user in report.user.items():
                counted.setdefault(uid, []).append(user)
        for uid, parts in counted.items():
            found[uid] = followed(found.get(uid, {}), united(parts))
    return found


def letters_of(rounds: Sequence[Sequence[Report]]) -> dict[str, list[LetterSample]]:
    """Return per operator a few of the rows that were put aside, of all subtasks and rounds."""
    found: dict[str, list[LetterSample]] = {}
    for reports in rounds:
        for report in sorted(latest(reports), key=lambda r: (r.level, r.subtask)):
            for uid, sample in report.letters.items():
                found[uid] = [*found.get(uid, ()), *sample][:SAMPLE_MAX]
    return found


def heat_of(rounds: Sequence[Sequence[Report]]) -> dict[str, dict[str, Any]]:
    """Per operator with keys, where its rows fell."""
    groups: dict[str, list[int]] = {}
    keys: dict[str, list[tuple[str, int]]] = {}
    for reports in rounds:
        for report in latest(reports):
            for uid, rows in report.group_rows.items():
                groups[uid] = _added_up(groups.get(uid), rows)
                keys.setdefault(uid, []).extend(report.hot_keys.get(uid, ()))
    return {
        uid: {
            "group_rows": rows,
            "hot_keys": [{"key": key, "rows": count} for key, count in hottest(keys[uid])],
        }
        for uid, rows in groups.items()
    }


def _added_up(before: list[int] | None, rows: list[int]) -> list[int]:
    if before is None or len(before) != len(rows):
        return rows
    return [first + second for first, second in zip(before, rows, strict=True)]


def timings_of(
    spec: JobSpec,
    rounds: Sequence[Sequence[Report]],
    begin: Begin,
    ran_ms: float,
    sources_ms: int | None = None,
    last_commit_ms: float = 0.0,
) -> dict[str, Any]:
    """Where the time went: the slowest subtask of each phase, alignment per level, all of it.

    `snapshot_ms` is what the epoch waited for, `base_ms` what ran beside the epochs. Of several
    rounds phases count together, and subtasks are those of the first. `last_commit_ms` is of the
    epoch before: its sinks publish after its record is written.
    """
    timings: dict[str, Any] = {"run_ms": round(ran_ms, 1), "attempts": begin.execution.attempt + 1}
    timings["rounds"] = len(rounds)
    timings["last_commit_ms"] = round(last_commit_ms, 1)
    for name in ("begin_ms", "process_ms", "snapshot_ms"):
        slowest = (max((getattr(r, name) for r in reports), default=0.0) for reports in rounds)
        timings[name] = round(sum(slowest), 1)
    reports = [report for each in rounds for report in each]
    compacted = announced(reports)
    timings["base_ms"] = round(max((c.ms for c in compacted if c.kind == "base"), default=0.0), 1)
    timings["merge_ms"] = round(max((c.ms for c in compacted if c.kind == "merge"), default=0.0), 1)
    waited = level_alignment_ms(spec.levels, reports, sources_ms)
    timings["alignment_ms"] = {str(level): ms for level, ms in waited.items()}
    timings["subtasks"] = [
        {
            "level": r.level,
            "subtask": r.subtask,
            "executor": r.executor,
            "restored": r.restored,
            "begin_ms": round(r.begin_ms, 1),
            "process_ms": round(r.process_ms, 1),
            "snapshot_ms": round(r.snapshot_ms, 1),
            "base_ms": round(sum(c.ms for c in r.compacted if c.kind == "base"), 1),
        }
        for r in sorted(rounds[0] if rounds else (), key=lambda r: (r.level, r.subtask))
    ]
    return timings


def metrics_of(
    spec: JobSpec,
    acks: Sequence[Ack],
    rounds: Sequence[Sequence[Report]],
    sources_ms: int | None = None,
) -> dict[str, Any]:
    """What was done, of all rounds together; what is held, as of the last one."""
    reports = [report for each in rounds for report in each]
    operators: dict[str, dict[str, Any]] = {}
    subtasks: dict[str, dict[int, int]] = {}
    for ack in acks:
        for op in ack.operators:
            sums = operators.setdefault(
                op.uid,
                dict.fromkeys((*_SUMMED, *_STATE), 0),
            )
            for name in _SUMMED:
                sums[name] += getattr(op, name)
            sums["entries_changed"] += op.keys_changed
            rows = subtasks.setdefault(op.uid, {})
            rows[ack.subtask] = rows.get(ack.subtask, 0) + op.rows_in
            sums["delta_bytes"] += 0 if op.delta is None else op.delta.length
    for (uid, _), held in state_held_of(rounds[-1] if rounds else ()).items():
        if uid in operators:
            operators[uid]["state_keys"] += held.keys
            operators[uid]["state_entries"] += held.entries
    compacted = announced(reports)
    waited = alignment_ms(spec.levels, reports, sources_ms)
    heat, letters = heat_of(rounds), letters_of(rounds)
    functions = {op.uid for level in spec.levels for op in level.operators}
    for uid, sums in operators.items():
        if uid in functions:
            sums["subtask_rows"] = [rows for _, rows in sorted(subtasks[uid].items())]
        if uid in waited:
            sums["alignment_ms"] = waited[uid]
        if uid in letters:
            sums[SAMPLE] = msgspec.to_builtins(letters[uid])
    return {
        "operators": {uid: {**sums, **heat.get(uid, {})} for uid, sums in operators.items()},
        "restored": sum(report.restored for report in reports),
        "bases": sum(file.kind == "base" for file in compacted),
        "base_bytes": sum(f.stored.uploaded_bytes or f.stored.length for f in compacted),
        "base_failures": sorted({r.base_failed for r in reports if r.base_failed}),
    }


SAMPLE = "error_sample"
"""Rows that were put aside, cut short: data, so it is shown like state and is in no metric."""
_BULKY = frozenset({"group_rows", "hot_keys", "subtask_rows", "user", SAMPLE})
_LAST = frozenset({"state_keys", "state_entries", "last_commit_ms"})


def added(before: dict[str, Any] | None, last: dict[str, Any]) -> dict[str, Any]:
    """Figures of several batches as those of one epoch.

    What was done adds up, and so does the time it took; what is held is as of the last
    batch, and so are subtasks.
    """
    if before is None:
        return last
    return {name: _sum(name, before.get(name), value) for name, value in last.items()}


def _sum(name: str, before: Any, last: Any) -> Any:
    if before is None or name in _LAST:
        return last
    if isinstance(last, dict):
        kept = {SAMPLE: before[SAMPLE]} if SAMPLE in before else {}
        return kept | {key: _sum(key, before.get(key), value) for key, value in last.items()}
    if name == SAMPLE:
        return [*before, *last][:SAMPLE_MAX]
    if isinstance(last, float | int):
        return round(before + last, 1) if isinstance(last, float) else before + last
    if name in ("group_rows", "subtask_rows"):
        return _added_up(before, last)
    if name == "hot_keys":
        found = hottest([(each["key"], each["rows"]) for each in (*before, *last)])
        return [{"key": key, "rows": rows} for key, rows in found]
    if name == "base_failures":
        return sorted({*before, *last})
    return last


def summary(epoch: Epoch, epoch_ms: float | None = None) -> dict[str, Any]:
    """An epoch in figures, as `run.metrics()` gives it."""
    state_bytes = sum(
        part.state_bytes for entry in epoch.operators.values() for part in entry.ranges
    )
    operators = operators_of(epoch)
    total_ms = epoch.timings.get("run_ms", 0.0) if epoch_ms is None else epoch_ms
    rows_in = _total(operators, "rows_in")
    return {
        "epoch": epoch.number,
        "parent": epoch.parent,
        "wall_ms": epoch.wall_ms,
        "rows_in": rows_in,
        "late_rows": _total(operators, "late_rows"),
        "untimed_rows": _total(operators, "untimed_rows"),
        "error_rows": _total(operators, "error_rows"),
        "watermark_ms": epoch.watermark_ms,
        "rows_per_s": round(rows_in / max(total_ms, 1e-3) * 1000),
        "state_keys": total_keys(operators),
        "state_entries": _total(operators, "state_entries"),
        "in_flight": in_flight(epoch),
        "state_bytes": state_bytes,
        "delta_bytes": delta_bytes_of(epoch),
        "epoch_ms": round(total_ms, 1),
        "parallelism": max((e.parallelism for e in epoch.operators.values()), default=0),
        "restored": epoch.metrics.get("restored", 0),
        "bases": epoch.metrics.get("bases", 0),
        "base_bytes": epoch.metrics.get("base_bytes", 0),
        "operators": {
            uid: {**measured, "state_bytes": _state_bytes(epoch, uid)}
            for uid, measured in operators.items()
        },
        "totals": epoch.metrics.get("totals", {}),
        "timings": epoch.timings,
    }


def operators_of(epoch: Epoch) -> dict[str, dict[str, Any]]:
    """Return what each operator measured, its broadcast state counted in.

    Records of loops are not state of an operator: `in_flight` counts them.
    """
    found: dict[str, dict[str, Any]] = {}
    for uid, measured in epoch.metrics.get("operators", {}).items():
        entry = epoch.operators.get(uid)
        if entry is not None and entry.scope == "feedback":
            continue
        if "state_entries" not in measured:
            measured = _of_older_version(measured)
        is_shared = entry is not None and entry.scope == "shared"
        owner = uid.partition(":")[0] if is_shared else uid
        found[owner] = _add_shared(found[owner], measured) if owner in found else measured
    return found


def _of_older_version(measured: dict[str, Any]) -> dict[str, Any]:
    """Return figures of a version that counted entries under the names of keys."""
    counted = measured.get("state_keys", 0)
    totals = measured.get("totals", {})
    if "keys_changed" in totals:
        totals = {**totals, "entries_changed": totals["keys_changed"]}
    return {
        **measured,
        "entries_changed": measured.get("keys_changed", 0),
        "state_keys": None if counted else 0,
        "state_entries": counted,
        "totals": totals,
    }


def _add_shared(own: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of an operator with those of its broadcast state."""
    sums = {
        name: own.get(name, 0) + shared.get(name, 0)
        for name in ("entries_changed", "state_entries", "delta_bytes")
    }
    totals = {
        name: value + (shared.get("totals", {}).get(name, 0) if name in sums else 0)
        for name, value in own.get("totals", {}).items()
    }
    return {**own, **sums, **({"totals": totals} if totals else {})}


def total_keys(operators: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return the keys of all operators; None if one of them was not counted."""
    counts = [each.get("state_keys", 0) for each in operators.values()]
    return None if None in counts else sum(counts)


def delta_bytes_of(epoch: Epoch) -> int:
    """Return how much the epoch wrote, records of loops too."""
    return _total(epoch.metrics.get("operators", {}), "delta_bytes")


def slender(operators: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of operators without those that are long."""
    return {
        uid: {name: value for name, value in measured.items() if name not in _BULKY}
        for uid, measured in operators.items()
    }


def _state_bytes(epoch: Epoch, operator: str) -> int:
    entries = (epoch.operators[uid] for uid in operator_uids(epoch.operators, operator))
    return sum(part.state_bytes for entry in entries for part in entry.ranges)


def _total(operators: dict[str, dict[str, Any]], name: str) -> int:
    # An epoch that came from a savepoint or a branch has run no rows.
    return sum(operator.get(name, 0) for operator in operators.values())
