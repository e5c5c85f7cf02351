"""Copy the measured numbers from bench/results into the README and docs/benchmarks.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
PAGE = HERE.parent / "docs" / "benchmarks.md"
START = "<!-- numbers: written by bench/readme.py from bench/results -->"
END = "<!-- /numbers -->"
NEXMARK_START = "<!-- nexmark: written by bench/readme.py from bench/results -->"
NEXMARK_END = "<!-- /nexmark -->"
FAILOVER_START = "<!-- failover: written by bench/readme.py from bench/results -->"
FAILOVER_END = "<!-- /failover -->"
MEMORY_START = "<!-- slot memory: written by bench/readme.py from bench/results -->"
MEMORY_END = "<!-- /slot memory -->"
EXTERNAL_PAGE = HERE.parent / "docs" / "operations" / "external-state.md"
EXTERNAL_START = "<!-- external: written by bench/readme.py from bench/results -->"
EXTERNAL_END = "<!-- /external -->"

Row = tuple[str, ...]


def result(name: str) -> dict[str, Any]:
    return json.loads(_path(name).read_text())


def _path(name: str) -> Path:
    return HERE / "results" / f"{name}.json"


def _is_measured(name: str) -> bool:
    return _path(name).exists()


def comparisons() -> str:
    """Return the README's table: ten numbers, each against a peer."""
    flink, sinks = result("flink")["ratios"], result("sinks")["of_plain"]
    faster = result("rescale")["times_faster_than_repartition_alone"]
    count = "Count and sum per key"
    rows = [
        (
            f"{count}, a Python function per row",
            "PySpark `transformWithState`",
            f"{result('keyed_count')['times_transform_with_state']:.1f} × as fast",
        ),
        (
            f"{count}, a Python function per row",
            "Flink SQL, heap",
            f"{flink['cairn_heap / flink_heap']:.2f} × as fast",
        ),
        (
            f"{count}, a Python function per row",
            "Flink SQL, RocksDB",
            f"{flink['cairn_rocksdb / flink_rocksdb']:.2f} × as fast",
        ),
        (
            f"{count}, `.aggregate`",
            "Flink SQL, heap",
            f"{flink['cairn_aggregate / flink_heap']:.2f} × as fast",
        ),
        (
            "Count per key in windows of 10 seconds",
            "Spark's streaming aggregation, default store",
            f"{result('windows')['times_spark']['default']:.2f} × as fast",
        ),
        (
            "Live rescale from 2 to 4 subtasks, 5 M keys",
            "Spark's offline repartition",
            f"{faster:.1f} × as fast",
        ),
        (
            "State of 5 M keys as a DataFrame",
            "Spark's `statestore` reader, default store",
            f"{result('read_state')['ratio']['default']:.2f} × as fast",
        ),
        (
            "Rows into Parquet files, exactly once",
            "Spark's `df.write`",
            f"{sinks['files, parquet']:.0%} of its speed",
        ),
        (
            "An epoch of 100 rows",
            "an empty `foreachBatch`",
            f"takes {result('epoch_overhead')['of_bare']:.2f} × as long",
        ),
        _hot_standby() or _first_epoch(),
    ]
    return _table(("task", "peer", "cairn against the peer"), rows)


def _first_epoch() -> Row:
    return (
        "From `python quickstart.py` to the first epoch",
        "PySpark with one `mapInArrow` batch",
        f"takes {result('first_epoch')['of_bare']:.2f} × as long",
    )


def _failover_cases() -> list[dict[str, Any]]:
    """Return what was measured of fail-overs; nothing before the first measurement."""
    is_measured = _is_measured("failover")
    return list(result("failover")["cases"]) if is_measured else []


def _hot_standby() -> Row | None:
    """Return the README's row of the hot standby with the most state in memory."""
    cases = [case for case in _failover_cases() if case["group"] == "zookeeper"]
    hot = max((case for case in cases if _is(case, "heap", "hot")), key=_keys, default=None)
    if hot is None:
        return None
    return (
        f"From SIGKILL of the driver to the next epoch, {_millions(hot['keys'])} keys, hot standby",
        "a restart at once",
        f"takes {hot['of_cold']:.2f} × as long: {hot['total_s']:.1f} s",
    )


def _is(case: dict[str, Any], backend: str, kind: str) -> bool:
    return bool(case["backend"] == backend and case["kind"] == kind)


def _keys(case: dict[str, Any]) -> int:
    return int(case["keys"])


def failovers() -> str:
    """Return the table of fail-overs: seconds of detection and of start, for each standby."""
    cases = _failover_cases()
    found = {(case["backend"], case["keys"], case["group"], case["kind"]): case for case in cases}
    rows = []
    for backend, keys in sorted({(case["backend"], case["keys"]) for case in cases}):
        cold = found[backend, keys, "", "cold"]
        for group in ("zookeeper", "store", "kubernetes"):
            standbys = [found.get((backend, keys, group, kind)) for kind in ("warm", "hot")]
            if any(standbys):
                rows.append(
                    (
                        f"{backend}, {_millions(keys)} keys",
                        group,
                        f"{cold['total_s']:.1f} s",
                        *(_gap(case) for case in standbys),
                    )
                )
    head = ("state", "leadership", "cold restart", "warm standby", "hot standby")
    return _table(head, rows) if rows else "Not measured yet."


def _gap(case: dict[str, Any] | None) -> str:
    if case is None:
        return "-"
    return f"{case['total_s']:.1f} s: {case['detection_s']:.1f} + {case['start_s']:.1f}"


def slot_memory() -> str:
    """Return the table of the memory of slots with state that waits for a time."""
    rows = []
    cases = result("slot_memory")["cases"]
    order = {"timers": 0, "ttl": 1, "windows": 2}
    for case in sorted(cases, key=lambda c: (c["backend"], order[c["kind"]], c["code"])):
        fill, restore = case["fill"], case["restore"]
        rows.append(
            (
                f"{case['kind']}, {case['backend']}, {_millions(case['keys'])} keys",
                case["code"],
                f"{case['few']['mb']:.0f} MB",
                f"{fill['mb']:.0f} MB",
                f"{case['bytes_per_key']:.0f}",
                f"{restore['first_due_rows']:,}",
                f"{restore['first_due_s']:.2f} s",
            )
        )
    head = (
        "state",
        "code",
        "memory with 0.3 M keys",
        "with all",
        "bytes per key more",
        "rows read after a restore until what is due next is known",
        "in",
    )
    return _table(head, rows)


def _part(count: dict[str, Any]) -> str:
    """Return the part of the plain pipe's rate; earlier results have another denominator."""
    return f"{count.get('of_pipe') or count['of_identity']:.1%}"


def _pipe(count: dict[str, Any], earlier: str) -> str:
    is_pipe = "of_pipe" in count
    return "a plain shuffle with an identity `mapInArrow`" if is_pipe else earlier


def measurements() -> str:
    """Return the table of docs/benchmarks.md: every number, with its script."""
    count, small, growth = result("keyed_count"), result("epoch_overhead"), result("state_growth")
    start = result("first_epoch")
    rates = count["rows_per_s"]
    rows = [
        (
            "Running count and sum per key, a Python function per row, 1 M keys, every 1 M rows "
            "a committed epoch",
            f"{_part(count)} of {_pipe(count, 'the same pipeline with an identity function')}; "
            f"{count['times_transform_with_state']:.1f} × PySpark's `transformWithState` "
            f"({rates['cairn']:,} and {rates['transform_with_state']:,} rows/s on 2 cores)",
            "`bench/keyed_count.py`",
        ),
        (
            "An epoch of 100 rows",
            f"{small['of_bare']:.2f} × a bare `foreachBatch` that does no work",
            "`bench/epoch_overhead.py`",
        ),
        (
            "From `python quickstart.py` to the first committed epoch; the same on the first run "
            "on a machine",
            f"{start['of_bare']:.2f} × and {start['of_bare_without_archive']:.2f} × a bare PySpark "
            "program that runs one batch with `mapInArrow`",
            "`bench/first_epoch.py`",
        ),
        (
            f"The same {growth['changed_keys_per_epoch']:,} changed keys per epoch on 5 M keys of "
            "state",
            f"{growth['median_ratio']:.2f} × the epoch on 100 k keys; "
            f"{growth['slot_bytes_per_key']} bytes of memory per key with two states",
            "`bench/state_growth.py`",
        ),
        *_time(),
        *_streams(),
        *_snapshots(),
        *_outside(),
    ]
    return _table(("task", "measured", "script"), rows)


def _time() -> list[Row]:
    aggregate, batch = result("keyed_count_aggregate"), result("keyed_count_process_batch")
    windows, skew, heap, disk = map(result, ("windows", "skew", "ttl_heap", "ttl_rocksdb"))
    of_spark, left = windows["times_spark"], skew["of_uniform"]
    return [
        (
            "The same count and sum with `.aggregate`, and with a function on Arrow batches",
            f"{_part(aggregate)} and {_part(batch)} of {_pipe(batch, 'the identity function')}",
            "`bench/keyed_count.py --api aggregate`, `--api process_batch`",
        ),
        (
            "Count per key in windows of 10 seconds",
            f"{of_spark['rocksdb']:.2f} × Spark's own streaming aggregation with its RocksDB "
            f"store, {of_spark['default']:.2f} × with the default one",
            "`bench/windows.py`",
        ),
        (
            "One key has half of all rows",
            f"{left['aggregate']:.1%} of the speed with uniform keys for `.aggregate`, "
            f"{left['process']:.1%} for `.process`",
            "`bench/skew.py`",
        ),
        (
            f"90 % of {_millions(heap['keys'])} keys expire: space returned, and slow epochs (95th "
            "percentile) during removal against those before",
            f"{heap['returned']:.0%} of the memory, {_slow(heap):.2f} × (heap); "
            f"{disk['returned']:.0%} of the disk, {_slow(disk):.2f} × (RocksDB)",
            "`bench/ttl.py`",
        ),
    ]


def _streams() -> list[Row]:
    chaining, alignment = result("chaining"), result("alignment")
    faster, ratio = chaining["times_faster"], alignment["ratio"]
    return [
        (
            "Five steps in a row, with state and without, in one process instead of with a shuffle "
            "before each",
            f"{faster['stateful']:.2f} × and {faster['stateless']:.2f} × as fast",
            "`bench/chaining.py`",
        ),
        (
            "Alignment, from the first to the last upstream subtask to finish: 16 subtasks against "
            "2, 5 shuffles against 1, 1 M keys of state against 10 k (plotted in "
            "`bench/results/alignment.svg`; on 2 cores it also depends on scheduling)",
            f"{ratio['parallelism']['16']:.1f} ×, {ratio['shuffles']['5']:.1f} × in total and "
            f"{ratio['keys']['1000000']:.1f} ×",
            "`bench/alignment.py`",
        ),
    ]


def _snapshots() -> list[Row]:
    rocks, base = result("keyed_count_rocksdb"), result("async_base")
    incremental, rescale = result("incremental"), result("rescale")
    recovery = result("recovery")
    uploaded = incremental["uploaded_of_full"]
    aged = recovery["aged_of_fresh"]
    return [
        (
            "The same count and sum with state in RocksDB (the state fits its memory)",
            f"{rocks['of_heap']:.1%} of the heap",
            "`bench/keyed_count.py --backend rocksdb`",
        ),
        (
            f"Slow epochs (95th percentile) while bases of {_millions(base['keys'])} keys are "
            "written in the background",
            f"{base['p95_of_median_without']:.2f} × the median epoch without",
            "`bench/async_base.py`",
        ),
        (
            "Upload of a RocksDB base after 1 % of the keys changed",
            f"{uploaded['mean']:.1%} of the full size on average, {uploaded['max']:.0%} at most",
            "`bench/incremental.py`",
        ),
        (
            "The same count and sum in Flink SQL, both reading CSV: cairn's Python function per "
            "row on the heap and in RocksDB, and its `.aggregate` on the heap",
            _of_flink(result("flink")),
            "`bench/flink.py`",
        ),
        (
            f"Live rescale from 2 to 4 subtasks with {_millions(rescale['keys'])} keys, until the "
            "first epoch is committed",
            f"{rescale['times_faster_than_repartition_alone']:.1f} × as fast as Spark's offline "
            f"repartition; {rescale['median']['cairn']['bytes_rewritten']:.0f} bytes of state "
            "rewritten",
            "`bench/rescale.py`",
        ),
        (
            f"Start after {recovery['aged_epochs']:,} epochs, against a young job with as many "
            "keys",
            ", ".join(f"{facts['seconds']:.2f} × ({name})" for name, facts in aged.items()),
            "`bench/recovery.py`",
        ),
        *_databases(),
        *_fail_over(),
        *_autoscale(),
    ]


def _databases() -> list[Row]:
    if not _is_measured("external"):
        return []
    found = result("external")
    rows = []
    if growth := found["growth"]:
        keys = sorted({case["keys"] for case in found["starts"]})
        rows.append(
            (
                f"With {_millions(keys[-1])} keys against {_millions(keys[0])}, until the first "
                "epoch is committed: start, rollback by ten epochs, live rescale from 2 to 4 "
                "subtasks",
                "; ".join(
                    f"{', '.join(f'{ratio:.2f} ×' for ratio in facts.values())} ({name})"
                    for name, facts in sorted(growth.items())
                ),
                "`bench/external.py`",
            )
        )
    if found["throughput"]:
        rows.append(
            (
                "The same count and sum with state in a database, against RocksDB with the same "
                "memory: all keys in memory; a tenth of them, and keys by Zipf's law",
                "; ".join(
                    f"{_of_rocksdb(found, name, 'cached')} and {_of_rocksdb(found, name, 'zipf')} "
                    f"({name})"
                    for name in ("postgres", "redis")
                ),
                "`bench/external.py`",
            )
        )
    return rows


def _of_rocksdb(found: dict[str, Any], backend: str, case: str) -> str:
    """Return the part of RocksDB's throughput that a database has."""
    parts = [
        each["of_rocksdb"]
        for each in found["throughput"]
        if (each["backend"], each["case"]) == (backend, case)
    ]
    return f"{parts[0]:.0%}" if parts else "-"


def _fail_over() -> list[Row]:
    if not _failover_cases():
        return []
    measured = result("failover")
    ratio, total_s = measured["of_cold"], measured["total_s_max"]
    largest = _millions(max(case["keys"] for case in measured["cases"]))
    return [
        (
            f"From SIGKILL of the driver to the next epoch, up to {largest} keys, with a session "
            f"of {measured['session']}: hot standby, warm standby",
            f"{ratio['hot']:.2f} × and {ratio['warm']:.2f} × a restart at once; at most "
            f"{total_s['hot']:.1f} s and {total_s['warm']:.1f} s",
            "`bench/failover.py`",
        )
    ]


def _autoscale() -> list[Row]:
    """Return the row of autoscaling, once it was measured."""
    if not _is_measured("autoscale"):
        return []
    measured = result("autoscale")
    load, zipf = measured["load"], measured["zipf"]
    caught_up = [load[name]["caught_up_s"] for name in ("autoscale", "fixed_2", "fixed_8")]
    return [
        (
            "A load that steps from 1 × to 4 ×, until no row waits longer than two seconds: "
            "autoscaling from 1 to 8 subtasks, fixed 2, fixed 8; subtasks that autoscaling used, "
            "of the 8. Keys by Zipf's law: rows of the busiest subtask over the median one, with "
            "equal ranges and with ranges by load",
            f"{caught_up[0]:.0f} s, {caught_up[1]:.0f} s, {caught_up[2]:.0f} s; "
            f"{measured['subtasks_of_fixed_8']:.0%}. {zipf['busiest_over_median_equal']:.2f} and "
            f"{zipf['busiest_over_median_by_load']:.2f}",
            "`bench/autoscale.py`",
        )
    ]


def _outside() -> list[Row]:
    latency, query, tables = result("latency"), result("query"), result("read_state")
    scale = result("scale")
    bare, one, four = latency["p50_of_bare"], *query["busy"]
    of = result("sinks")["of_plain"]
    kinds = [
        [f"files, {form}" for form in ("parquet", "json", "csv")],
        [f"postgres, {way}" for way in ("append", "prepared", "upsert")],
        *(["delta"], ["spark (wal)"], ["redis"], ["foreach"]),
    ]
    return [
        (
            "Rows into each sink, relative to the plain writer with the same rows: files "
            "(Parquet, JSON, CSV), PostgreSQL (append, prepared, upsert), Delta, any Spark writer, "
            "Redis, Foreach",
            "; ".join(", ".join(f"{of[kind]:.1%}" for kind in alike) for alike in kinds),
            "`bench/sinks.py`",
        ),
        (
            "From the creation of a row until a reader sees it, median at 1,000 rows/s with a "
            "trigger of a second: files, PostgreSQL",
            f"{bare['files']:.2f} × and {bare['postgres']:.2f} × a bare `foreachBatch` that writes "
            "the same",
            "`bench/latency.py`",
        ),
        (
            f"Queries by key while the job runs, {_millions(query['keys'])} keys: one client, "
            f"four; slowdown of the job under {query['rate']:,} queries/s",
            f"{one['queries_per_s']:,} and {four['queries_per_s']:,} queries/s, 99 % within "
            f"{one['p99_ms']} and {four['p99_ms']} ms; {query['slowdown']:.1%}",
            "`bench/query.py`",
        ),
        (
            f"State of {_millions(tables['keys'])} keys read as a DataFrame",
            f"{tables['ratio']['default']:.2f} × Spark's `statestore` reader with its default "
            f"state store, {tables['ratio']['rocksdb']:.2f} × with RocksDB "
            f"({tables['rows_per_s']['cairn']:,} rows/s)",
            "`bench/read_state.py`",
        ),
        (
            "The driver's time per epoch with 1,000 subtasks, ten operators and 10 TB of state, "
            "played without Spark; CPU alone; bytes that each Spark task carries",
            f"{scale['times_driver_time']:.1f} × that with 100 subtasks; "
            f"{scale['times_driver_cpu']:.1f} ×; {scale['task_carries_times']:.2f} ×",
            "`bench/scale.py`",
        ),
    ]


def _slow(ttl: dict[str, Any]) -> float:
    return float(ttl["p95_ms"]["removing"] / ttl["p95_ms"]["before"])


def _of_flink(flink: dict[str, Any]) -> str:
    of = flink["ratios"]
    heap, rocksdb = of["cairn_heap / flink_heap"], of["cairn_rocksdb / flink_rocksdb"]
    aggregate = of["cairn_aggregate / flink_heap"]
    return f"{heap:.2f} ×, {rocksdb:.2f} × and {aggregate:.2f} × Flink with the same backend"


def _millions(count: int) -> str:
    return f"{count / 1e6:g} M" if count else "no"


def _table(head: Row, rows: list[Row]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def external() -> str:
    """Return the tables of state in databases: starts by number of keys, and throughput."""
    if not _is_measured("external"):
        return "Not measured yet."
    found = result("external")
    tables = []
    if found["starts"]:
        head = ("state", "start", "rollback by 10 epochs", "rescale 2 to 4", "rows read (deltas)")
        rows = [
            (
                f"{case['backend']}, {_millions(case['keys'])} keys",
                *(f"{case[fact]:.2f} s" for fact in ("start_s", "rollback_s", "rescale_s")),
                _rows_read(case),
            )
            for case in found["starts"]
        ]
        tables.append(_table(head, rows))
    if found["throughput"]:
        cases = {"cached": "all keys in memory", "zipf": "memory for a tenth, Zipf keys"}
        rows = [
            (
                cases[case["case"]],
                case["backend"],
                f"{case['rows_per_s']:,} rows/s",
                f"{case['of_rocksdb']:.1%}",
            )
            for case in found["throughput"]
        ]
        tables.append(_table(("keys", "state", "throughput", "of RocksDB"), rows))
    return "\n\n".join(tables)


def _rows_read(case: dict[str, Any]) -> str:
    """Return the rows of state that were read before the first epoch, and those of its deltas."""
    if "rows_read_beforehand" not in case:
        return "-"
    return f"{case['rows_read_beforehand']:,.0f} ({case['rows_of_deltas']:,.0f})"


def nexmark() -> str:
    """Return the table of Nexmark: a column per query, better and worse."""
    heap, disk = result("nexmark"), result("nexmark_rocksdb")
    peers = {
        "Flink SQL, heap": (heap, "flink"),
        "Flink SQL, RocksDB": (disk, "flink"),
        "Spark's streaming SQL": (heap, "spark"),
    }
    queries = list(heap["ratios"]["flink"])
    rows = [
        (
            name,
            *(_ratio(found["ratios"][peer].get(query)) for query in queries),
            _ratio(found["geometric_mean"][peer]),
        )
        for name, (found, peer) in peers.items()
    ]
    return _table(("cairn over", *queries, "mean"), rows)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def fill_in(text: str, table: str, start: str = START, end: str = END) -> str:
    """Return the text with the table between its two marks."""
    head, rest = text.split(start)
    _, tail = rest.split(end)
    return f"{head}{start}\n{table}\n{end}{tail}"


def main() -> None:
    for path, table in ((README, comparisons()), (PAGE, measurements())):
        text = fill_in(path.read_text(), table)
        if NEXMARK_START in text:
            text = fill_in(text, nexmark(), NEXMARK_START, NEXMARK_END)
        if FAILOVER_START in text:
            text = fill_in(text, failovers(), FAILOVER_START, FAILOVER_END)
        if MEMORY_START in text:
            text = fill_in(text, slot_memory(), MEMORY_START, MEMORY_END)
        path.write_text(text)
    page = fill_in(EXTERNAL_PAGE.read_text(), external(), EXTERNAL_START, EXTERNAL_END)
    EXTERNAL_PAGE.write_text(page)


if __name__ == "__main__":
    main()
