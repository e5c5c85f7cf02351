"""Print the differences between two epochs: counts per state, with examples.

Always true here:
- pickled objects are never unpickled: only their size is printed.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from cairn.cli.checkpoint import open_checkpoint
from cairn.cli.tables import printable, stdout_console
from cairn.report.text import count
from cairn.snapshots import Example, StateDiff, diff_epochs
from cairn.types.codec.json_values import loose_json

Facts = dict[str, Any]

VALUE_CHARS_MAX = 60
_MARKS = {"added": ("+", "green"), "changed": ("~", "yellow"), "removed": ("-", "red")}


def diff_facts(
    checkpoint: str, a: int, b: int, *, operator: str | None, state: str | None, limit: int
) -> Facts:
    store = open_checkpoint(checkpoint)
    diffs = diff_epochs(store, a, b, operator=operator, state=state, limit=limit)
    return {
        "checkpoint": store.url,
        "before": a,
        "after": b,
        "states": [_state_facts(diff) for diff in diffs],
    }


def _state_facts(diff: StateDiff) -> Facts:
    examples = {
        "added": diff.added_examples,
        "changed": diff.changed_examples,
        "removed": diff.removed_examples,
    }
    return {
        "operator": diff.operator,
        "state": diff.state,
        "kind": diff.kind,
        "type": diff.type,
        "only_in": diff.only_in,
        "added": diff.added,
        "changed": diff.changed,
        "removed": diff.removed,
        "examples": {
            how: [_example_facts(diff, how, example) for example in found]
            for how, found in examples.items()
        },
    }


def _example_facts(diff: StateDiff, how: str, example: Example) -> Facts:
    facts: Facts = {"key": loose_json(example.key)}
    if example.entry is not None:
        # The entry of an operator list is (position, number of a copy).
        is_item = diff.kind == "operator_list"
        facts["entry"] = loose_json(example.entry[0] if is_item else example.entry)
    if how != "added":
        facts["before"] = _value_facts(diff, example.before)
    if how != "removed":
        facts["after"] = _value_facts(diff, example.after)
    return facts


def _value_facts(diff: StateDiff, value: Any) -> Any:
    if diff.type != "object":
        return loose_json(value)
    if isinstance(value, tuple):
        return [_value_facts(diff, item) for item in value]
    return None if value is None else f"<{len(value)} bytes pickled>"


def print_diff(facts: Facts) -> None:
    console = stdout_console()
    console.print(
        Text.assemble(
            (f"epoch {facts['before']} → epoch {facts['after']}", "bold"),
            (f"  {facts['checkpoint']}", "dim"),
        ),
        soft_wrap=True,
    )
    states = facts["states"]
    if not states:
        console.print("neither epoch has any state")
        return
    names = [f"{each['operator']}.{each['state']}" for each in states]
    cells = [[count(each[how]) for how in _MARKS] for each in states]
    widths = [max(len(row[at]) for row in [*cells, list(_MARKS)]) for at in range(3)]
    longest = max(map(len, [*names, "state"]))
    head = "  ".join(map(str.rjust, _MARKS, widths))
    console.print(Text(f"{'state'.ljust(longest)}  {head}", "dim"))
    for each, name, row in zip(states, names, cells, strict=True):
        line = Text.assemble((name.ljust(longest), "bold"), "  ")
        line.append("  ".join(map(str.rjust, row, widths)))
        if each["only_in"] is not None:
            side = facts["before"] if each["only_in"] == "before" else facts["after"]
            line.append(f"  only in epoch {side}", "cyan")
        console.print(line, soft_wrap=True)
        _print_examples(console, each)


def _print_examples(console: Console, state: Facts) -> None:
    for how, (mark, style) in _MARKS.items():
        for example in state["examples"][how]:
            name = _text(example["key"])
            if "entry" in example:
                name = f"{name} [{_text(example['entry'])}]"
            values = [_text(example[side]) for side in ("before", "after") if side in example]
            line = Text.assemble("  ", (f"{mark} ", style), f"{name}: {' → '.join(values)}")
            console.print(line, soft_wrap=True)
        left_out = state[how] - len(state["examples"][how])
        if left_out and state["examples"][how]:
            console.print(Text(f"    and {count(left_out)} more {how}", "dim"))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{name}={_text(each)}" for name, each in value.items())
        text = f"({inner})"
    else:
        text = "null" if value is None else str(value)
    text = printable(text)
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 1] + "…"
