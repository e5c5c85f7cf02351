"""Counting by changes gives what counting everything gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.manifest import Epoch, EpochOperator, FileRef, RangeState, SparkPosition
from cairn.storage.references import References, changes, files_of

NAMES = st.lists(st.sampled_from("abcdef"), max_size=4)
LAYOUTS = st.dictionaries(st.sampled_from(["u", "v"]), st.lists(NAMES, max_size=3))


def file(name: str) -> FileRef:
    return FileRef(
        id=name,
        path=name,
        offset=0,
        length=1,
        kind="delta",
        tier=0,
        rows=1,
        first_epoch=1,
        last_epoch=1,
        first_group=0,
        group_count=1,
    )


def epoch(number: int, layout: dict[str, list[list[str]]]) -> Epoch:
    operators = {
        uid: EpochOperator(
            uid=uid,
            function_version="",
            key_types={},
            states={},
            parallelism=1,
            ranges=[
                RangeState(
                    first_group=at,
                    group_count=1,
                    version="",
                    files=[file(name) for name in names],
                    state_keys=0,
                    state_bytes=0,
                )
                for at, names in enumerate(ranges)
            ],
        )
        for uid, ranges in layout.items()
    }
    return Epoch(
        number=number,
        parent=None,
        term=1,
        nonce="",
        wall_ms=0,
        now_ms=0,
        watermarks={},
        spark=SparkPosition(folder="", batch_id=0, offsets=""),
        operators=operators,
    )


@given(st.lists(LAYOUTS, min_size=1, max_size=8), st.data())
def test_a_key_is_dropped_with_the_last_epoch_that_lists_it(layouts, data) -> None:
    counted: References[str] = References()
    model: dict[str, int] = {}
    newest = None
    for number, layout in enumerate(layouts, start=1):
        now = epoch(number, layout)
        added, removed = changes(newest, now)
        listed = {each.path for each in files_of(now)}
        before = set() if newest is None else {each.path for each in files_of(newest)}
        assert listed - before <= {each.path for each in added} <= listed
        assert before - listed <= {each.path for each in removed} <= before
        counted.advance([each.path for each in added], [each.path for each in removed], number - 1)
        model |= dict.fromkeys(listed, number)
        newest = now
        end = data.draw(st.integers(0, number))
        gone = {key for key, last in model.items() if last < end}
        assert set(counted.drop_before(end)) == gone
        for key in gone:
            del model[key]
        assert sorted(counted) == sorted(model)
        assert all(key in counted for key in model)


def test_a_range_with_one_delta_more_has_one_change() -> None:
    was = epoch(1, {"u": [["a", "b"], ["c"]]})
    now = epoch(2, {"u": [["a", "b", "d"], ["c"]]})
    added, removed = changes(was, now)
    assert [each.path for each in added] == ["d"] and not removed
