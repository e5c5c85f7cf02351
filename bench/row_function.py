"""How much does cairn add to a Python function that is called row by row?

Drives an operator as a slot does, without Spark: the count and sum per key of `keyed_count.py`, in
Arrow batches, epoch after epoch, with the delta and the promotion of every epoch. Compared, in the
same run, with a plain loop: the same arithmetic on one dict, from and to Arrow, with no snapshot.
With `--shape wide` rows have eight more columns that the function does not read. The first epoch
has every key once, and is left out.

    python bench/row_function.py [--shape wide] [--backend rocksdb]
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
from harness import SEED, note, report

from cairn import KeyedProcess, state
from cairn.backends import make_backend
from cairn.key_groups import key_groups
from cairn.protocol.messages import Begin
from cairn.protocol.spec import InletSpec, OperatorSpec, OutletSpec
from cairn.sinks.base import Execution
from cairn.slot.operator import Operator
from cairn.storage.manifest import EMPTY_VERSION
from cairn.types import parse_schema

GROUP_COUNT = 128
BATCH_ROWS = 10_000
MEMORY_BYTES = 256 << 20
OUT = parse_schema("k long, n long, s double")
WORDS = pa.array([f"a text of some length, number {number}" for number in range(1000)])


class Count(KeyedProcess[Any]):
    count = state.Value("long", default=0)
    total = state.Value("double", default=0.0)

    def process(self, row: Any, ctx: Any) -> Any:
        n = self.count.get() + 1
        s = self.total.get() + row.v
        self.count.set(n)
        self.total.set(s)
        return row.k, n, s


def make_batches(rng: np.random.Generator, k: Any, texts: int) -> list[pa.Array]:
    """Return the rows of an epoch as Spark delivers them."""
    batches = []
    for at in range(0, len(k), BATCH_ROWS):
        columns = {
            "k": pa.array(k[at : at + BATCH_ROWS]),
            "v": pa.array(rng.random(BATCH_ROWS)),
        }
        for number in range(texts):
            columns[f"text{number}"] = WORDS.take(pa.array(rng.integers(0, 1000, BATCH_ROWS)))
        batches.append(pa.RecordBatch.from_pydict(columns).to_struct_array())
    return batches


class PlainLoop:
    """The same arithmetic with nothing around it."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, float]] = {}

    def _process(self, k: int, v: float) -> tuple[int, int, float]:
        n, s = self._held.get(k, (0, 0.0))
        n += 1
        s += v
        self._held[k] = n, s
        return k, n, s

    def epoch(self, batches: list[pa.Array]) -> None:
        for batch in batches:
            k, v = (batch.field(name).to_numpy().tolist() for name in ("k", "v"))
            out = [self._process(*row) for row in zip(k, v, strict=True)]
            columns = zip(OUT.types, zip(*out, strict=True), strict=True)
            pa.RecordBatch.from_arrays([pa.array(c, t) for t, c in columns], schema=OUT)


class CairnOperator:
    """One subtask that owns all keys."""

    def __init__(self, schema: pa.Schema, backend: str, scratch: str) -> None:
        spec = OperatorSpec(
            uid="count",
            inlets=(InletSpec(0, schema, keys=("k",)),),
            function=cloudpickle.dumps(Count()),
            outlets=(OutletSpec(None, OUT, (), ()),),
        )
        held = make_backend(backend, f"{scratch}/state", MEMORY_BYTES)
        self._operator = Operator(spec, held, group_count=GROUP_COUNT)
        self._operator.main.targets.append(lambda batch: None)
        self._operator.declare()
        self._version = EMPTY_VERSION
        self._epoch = 0

    def epoch(self, batches: list[pa.Array], groups: list[pa.Array]) -> dict[str, float]:
        """Run an epoch; return the seconds of its parts."""
        operator = self._operator
        started = time.process_time()
        operator.state.bring_to(self._version, range(GROUP_COUNT), ())
        promoted = time.process_time()
        self._epoch += 1
        operator.open(
            Begin(
                run_id="bench",
                term=1,
                epoch=self._epoch,
                execution=Execution(),
                parent=None,
                now_ms=0,
                watermark_ms=None,
                parallelism=1,
                group_count=GROUP_COUNT,
                inline_bytes_max=0,
            ),
            0,
        )
        operator.begin_rows()
        for group, batch in zip(groups, batches, strict=True):
            operator.run(group, None, batch)
        operator.end()
        processed = time.process_time()
        operator.delta()
        operator.state.name_pending(f"delta-{self._epoch}")
        assert operator.state.pending is not None
        self._version = operator.state.pending
        return {
            "promote": promoted - started,
            "rows": processed - promoted,
            "delta": time.process_time() - processed,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows per epoch")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=5, help="measured epochs")
    parser.add_argument("--shape", choices=["narrow", "wide"], default="narrow")
    parser.add_argument("--backend", default="heap")
    parser.add_argument("--keep", action="store_true", help="keep the result")
    options = parser.parse_args()
    rng = np.random.default_rng(SEED)
    texts = 8 if options.shape == "wide" else 0
    schema = pa.schema(list(make_batches(rng, np.zeros(BATCH_ROWS, np.int64), texts)[0].type))
    gc.disable()  # As in a slot while it processes rows.
    measured: dict[str, list[float]] = {"plain": [], "promote": [], "rows": [], "delta": []}
    with tempfile.TemporaryDirectory() as scratch:
        plain, cairn = PlainLoop(), CairnOperator(schema, options.backend, scratch)
        for number in range(options.epochs + 1):
            k = rng.integers(0, options.keys, options.rows)
            if not number:
                k = rng.permutation(options.keys)
            batches = make_batches(rng, k, texts)
            groups = [
                pa.array(key_groups(batch.field("k"), pa.int64(), GROUP_COUNT).astype(np.int32))
                for batch in batches
            ]
            started = time.process_time()
            plain.epoch(batches)
            seconds = {"plain": time.process_time() - started}
            seconds |= cairn.epoch(batches, groups)
            if number:
                for name, spent in seconds.items():
                    measured[name].append(spent)
            note(" ".join(f"{name} {1000 * spent:,.0f} ms" for name, spent in seconds.items()))
    # Processor time, and the least of it: others on the machine only ever add.
    least = {name: min(spent) for name, spent in measured.items()}
    report(
        "row_function" + ("_wide" if texts else ""),
        {
            "us_per_row": {n: round(1e6 * spent / options.rows, 3) for n, spent in least.items()},
            "of_plain_loop": round(
                least["plain"] / (least["rows"] + least["delta"] + least["promote"]), 4
            ),
            "rows_of_plain_loop": round(least["plain"] / least["rows"], 4),
            "rows_per_epoch": options.rows,
            "epochs": options.epochs,
            "keys": options.keys,
        },
        keep=options.keep,
    )


if __name__ == "__main__":
    main()
