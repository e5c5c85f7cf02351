"""Copy the measured numbers from bench/results into the README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
START = "<!-- numbers: written by bench/readme.py from bench/results -->"
END = "<!-- /numbers -->"


def result(name: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def numbers() -> str:
    count, small, growth = result("keyed_count"), result("epoch_overhead"), result("state_growth")
    rates = count["rows_per_s"]
    rows = [
        (
            "Running count and sum per key, a Python function per row, 1 M keys, every 1 M rows "
            "a committed epoch",
            f"{count['of_identity']:.0%} of the same pipeline with an identity function; "
            f"{count['times_transform_with_state']:.0f} × PySpark's `transformWithState` "
            f"({rates['cairn']:,} and {rates['transform_with_state']:,} rows/s on 2 cores)",
            "`bench/keyed_count.py`",
        ),
        (
            "An epoch of 100 rows",
            f"{small['of_bare']:.2f} × a bare `foreachBatch` that does no work",
            "`bench/epoch_overhead.py`",
        ),
        (
            f"The same {growth['changed_keys_per_epoch']:,} changed keys per epoch on 5 M keys of "
            "state",
            f"{growth['median_ratio']:.2f} × the epoch on 100 k keys; "
            f"{growth['slot_bytes_per_key']} bytes of memory per key with two states",
            "`bench/state_growth.py`",
        ),
    ]
    lines = ["| what | measured | by |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> None:
    text = README.read_text()
    head, rest = text.split(START)
    _, tail = rest.split(END)
    README.write_text(f"{head}{START}\n{numbers()}\n{END}{tail}")


if __name__ == "__main__":
    main()
