"""Windows against a model that holds all rows and computes everything anew."""

from __future__ import annotations

import datetime as dt
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cairn import windows
from cairn.windows import Session, WindowSpec
from tests.unit.operators.windowed import (
    T0,
    T0_MS,
    listed,
    state_is_empty,
)


class Model:
    """Windows over rows held in a list, computed anew whenever something is asked."""

    def __init__(self, spec: WindowSpec) -> None:
        self.spec = spec
        self.kept: list[tuple[int, int]] = []
        self.late: list[tuple[int, int]] = []
        self.results: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
        self.watermark_ms: int | None = None

    def windows(self, rows: list[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        if isinstance(self.spec, Session):
            gap_us = self.spec.gap_ms * 1000
            start = end = None
            for time, v in sorted(rows):
                if start is None or end is None or time > end:
                    start = time
                else:
                    found[start, time + gap_us] = found.pop((start, end))
                end = time + gap_us
                found.setdefault((start, end), []).append(v)
            return found
        for time, v in sorted(rows):
            for bounds in self.spec.assign(time):
                found.setdefault(bounds, []).append(v)
        return found

    def is_done(self, end_us: int) -> bool:
        mark = self.watermark_ms
        return mark is not None and windows.complete_ms(self.spec, end_us) <= mark

    def add(self, time: int, v: int) -> None:
        around = [bounds for bounds, vs in self.windows([*self.kept, (time, v)]).items() if v in vs]
        if all(self.is_done(end) for _, end in around):
            self.late.append((time, v))
        else:
            self.kept.append((time, v))

    def move(self, watermark_ms: int | None) -> None:
        """The windows that a watermark completes emit."""
        before = self.watermark_ms
        for bounds, vs in self.windows(self.kept).items():
            done_ms = windows.complete_ms(self.spec, bounds[1])
            is_new = before is None or done_ms > before
            if is_new and (watermark_ms is None or done_ms <= watermark_ms):
                self.results[*bounds, tuple(vs)] += 1
        if watermark_ms is not None:
            self.watermark_ms = watermark_ms
        if isinstance(self.spec, Session):
            gone = [b for b in self.windows(self.kept) if self.is_done(b[1])]
            self.kept = [r for r in self.kept if not any(s <= r[0] < e for s, e in gone)]


specs = st.one_of(
    st.integers(1, 12).map(lambda n: windows.tumbling(f"{n} ms", offset=f"{n - 1} ms")),
    st.integers(1, 12).flatmap(
        lambda n: st.integers(1, n).map(lambda m: windows.sliding(f"{n} ms", f"{m} ms"))
    ),
    st.integers(1, 6).map(lambda n: windows.session(f"{n} ms")),
)
# Often on a whole millisecond, where bounds and watermarks are.
moments = st.one_of(st.integers(0, 40).map(lambda ms: ms * 1000), st.integers(0, 40_000))
streams = st.lists(st.tuples(st.lists(moments, max_size=6), st.integers(0, 8)), max_size=8)


@given(specs, streams, st.booleans())
def test_windows_agree_with_the_model(
    spec: WindowSpec, epochs: list[tuple[list[int], int]], restores: bool
) -> None:
    model = Model(spec)
    mark = count = 0
    all_rows: list[tuple[int, int]] = []
    in_time = True
    with listed(spec) as harness:
        for times, step in epochs:
            rows = []
            for time in sorted(times):
                count += 1
                rows.append((time, count))
                all_rows.append((T0_MS * 1000 + time, count))
                in_time &= time >= mark * 1000
            for time, v in rows:
                model.add(T0_MS * 1000 + time, v)
            for time, v in rows:  # One by one: rows of one time keep their order.
                harness.push(("a", T0 + dt.timedelta(microseconds=time), v))
            harness.commit()
            if restores:
                harness.snapshot_and_restore()
            mark += step
            harness.advance_watermark(T0_MS + mark)
            harness.tick()
            model.move(T0_MS + mark)
        harness.drain()
        model.move(None)
        microsecond = dt.timedelta(microseconds=1)
        found = Counter(
            (*(T0_MS * 1000 + (t - T0) // microsecond for t in (start, end)), values)
            for _, start, end, values in harness.outputs
        )
        assert found == model.results
        if in_time:
            batch = model.windows(all_rows)
            assert found == Counter((*bounds, tuple(vs)) for bounds, vs in batch.items())
        assert [v for _, _, v in harness.side("late")] == [v for _, v in model.late]
        assert state_is_empty(harness)


@given(specs.filter(lambda spec: not isinstance(spec, Session)), streams, st.integers(0, 10))
def test_the_last_result_of_a_window_has_every_row_that_was_not_too_late(
    spec: WindowSpec, epochs: list[tuple[list[int], int]], lateness_ms: int
) -> None:
    expected: dict[tuple[int, int], list[tuple[int, int]]] = {}
    late = []
    mark: int | None = None
    count = 0
    with listed(spec, allowed_lateness_ms=lateness_ms) as harness:
        for times, step in epochs:
            for time in sorted(times):
                count += 1
                open_ = [
                    bounds
                    for bounds in spec.assign(T0_MS * 1000 + time)
                    if mark is None or bounds[1] // 1000 + lateness_ms > T0_MS + mark
                ]
                for bounds in open_:
                    expected.setdefault(bounds, []).append((time, count))
                if not open_:
                    late.append(count)
                harness.push(("a", T0 + dt.timedelta(microseconds=time), count))
            harness.commit()
            mark = step + (mark or 0)
            harness.advance_watermark(T0_MS + mark)
            harness.tick()
        harness.drain()
        last = {(start, end): values for _, start, end, values in harness.outputs}
        moment = dt.timedelta(microseconds=1)
        assert {
            tuple(T0_MS * 1000 + (t - T0) // moment for t in bounds): values
            for bounds, values in last.items()
        } == {bounds: tuple(v for _, v in sorted(rows)) for bounds, rows in expected.items()}
        assert [v for _, _, v in harness.side("late")] == late
        assert state_is_empty(harness)
