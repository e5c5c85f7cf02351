"""The job's watermark: the earliest of its origins that are awake, and never back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cairn.driver.coordinator.watermarks import Clocks
from cairn.plan.graph import Watermark
from cairn.types.durations import MAX_MS, MIN_MS

SOON = {"a": Watermark(1_000, 60_000), "b": Watermark(5_000, 60_000)}


def seen(**seconds: int) -> dict[str, int]:
    return {name: s * 1_000_000 for name, s in seconds.items()}


def test_it_is_the_earliest_of_all_origins_less_their_delays() -> None:
    clocks = Clocks().after(seen(a=100, b=102), SOON, 0)
    assert clocks.origins == {"a": 99_000, "b": 97_000}
    assert clocks.watermark_ms == 97_000


def test_there_is_none_until_every_origin_has_given_a_row() -> None:
    first = Clocks().after(seen(a=100), SOON, 0)
    assert first.watermark_ms is None and first.origins == {"a": 99_000, "b": None}
    assert first.after(seen(b=50), SOON, 1).watermark_ms == 45_000


def test_an_idle_origin_holds_it_back_no_longer() -> None:
    clocks = Clocks().after(seen(a=100, b=100), SOON, 0)
    clocks = clocks.after(seen(a=200), SOON, 59_999)
    assert clocks.watermark_ms == 95_000
    assert clocks.after({}, SOON, 60_000).watermark_ms == 199_000


def test_time_in_which_nobody_asked_is_no_idleness() -> None:
    # An epoch of two minutes, with rows of both; the next begins right after it.
    clocks = Clocks().after(seen(a=100, b=50), SOON, 0, ended_ms=120_000)
    assert clocks.after(seen(a=101), SOON, 120_100).watermark_ms == 45_000
    # The run began a moment ago, however long ago the last epoch was.
    clocks = Clocks().after(seen(a=100, b=50), SOON, 0)
    assert clocks.after({}, SOON, 900_000, awake_ms=899_000).watermark_ms == 45_000
    assert clocks.after({}, SOON, 960_000, awake_ms=899_000).watermark_ms == 99_000


def test_an_origin_that_gives_rows_is_not_idle() -> None:
    origins = {"a": Watermark(0, 0), "b": Watermark(0, 0)}
    assert Clocks().after(seen(a=10, b=50), origins, 0).watermark_ms == 10_000


def test_an_origin_that_never_gave_a_row_is_waited_for_from_when_it_was_first_there() -> None:
    clocks = Clocks(seen_ms={"a": 0}).after(seen(a=100), SOON, 1_000_000)
    assert clocks.watermark_ms is None
    assert clocks.after(seen(a=101), SOON, 1_060_000).watermark_ms == 100_000


def test_an_origin_that_wakes_up_does_not_turn_it_back() -> None:
    clocks = Clocks().after(seen(a=100, b=100), SOON, 0).after(seen(a=200), SOON, 60_000)
    assert clocks.watermark_ms == 199_000
    woken = clocks.after(seen(b=110), SOON, 61_000)
    assert woken.origins["b"] == 105_000 and woken.watermark_ms == 199_000
    # From now on it is waited for again.
    assert woken.after(seen(a=300), SOON, 62_000).watermark_ms == 199_000
    assert woken.after(seen(a=300, b=300), SOON, 62_000).watermark_ms == 295_000


def test_when_all_are_idle_it_is_as_far_as_any_has_come_in_whichever_order() -> None:
    clocks = Clocks().after(seen(a=100, b=200), SOON, 0).after(seen(b=201), SOON, 1_000)
    assert clocks.after({}, SOON, 500_000).watermark_ms == 196_000
    assert Clocks().after({}, SOON, 0).after({}, SOON, 500_000).watermark_ms is None


def test_without_idle_after_an_origin_is_waited_for_for_ever() -> None:
    origins = {"a": Watermark(0), "b": Watermark(0)}
    clocks = Clocks().after(seen(a=1, b=1), origins, 0).after(seen(a=9), origins, MAX_MS)
    assert clocks.watermark_ms == 1_000


def test_an_origin_added_later_holds_it_where_it_is() -> None:
    old = {"a": SOON["a"]}
    clocks = Clocks().after(seen(a=100), old, 0)
    added = clocks.after(seen(a=200), SOON, 1_000)
    assert added.watermark_ms == 99_000
    assert added.after(seen(b=300), SOON, 1_001).watermark_ms == 199_000


def test_an_origin_taken_away_no_longer_counts_and_what_was_reached_stays() -> None:
    clocks = Clocks().after(seen(a=100, b=100), SOON, 0)
    gone = clocks.after(seen(a=101), {"a": SOON["a"]}, 1)
    assert gone.origins == {"a": 100_000} and gone.watermark_ms == 100_000
    assert gone.after({}, {}, 2).watermark_ms == 100_000


def test_a_row_between_two_milliseconds_is_not_late_by_its_own_watermark() -> None:
    origins = {"a": Watermark(0)}
    for latest_us in (1_999, -1, -1_001):
        mark = Clocks().after({"a": latest_us}, origins, 0).watermark_ms
        assert mark is not None and mark * 1000 <= latest_us


def test_times_out_of_this_world_stay_within_what_can_be_said() -> None:
    origins = {"a": Watermark(10)}
    # Its very end is for draining alone.
    assert Clocks().after({"a": 2**63 - 1}, origins, 0).watermark_ms == MAX_MS - 1
    assert Clocks().after({"a": -(2**63)}, origins, 0).watermark_ms == MIN_MS


names = st.sampled_from("abc")
settings_of = st.dictionaries(
    names,
    st.builds(Watermark, st.integers(0, 50), st.none() | st.integers(0, 50)),
)
steps = st.lists(
    st.tuples(st.dictionaries(names, st.integers(-10, 10**6)), settings_of, st.integers(0, 40)),
    max_size=20,
)


@given(steps)
def test_it_never_goes_back_whatever_comes_goes_sleeps_and_wakes(
    steps: list[tuple[dict[str, int], dict[str, Watermark], int]],
) -> None:
    clocks, now_ms = Clocks(), 0
    for latest_us, origins, passed_ms in steps:
        now_ms += passed_ms
        after = clocks.after(latest_us, origins, now_ms)
        assert after.watermark_ms is not None or clocks.watermark_ms is None
        if clocks.watermark_ms is not None and after.watermark_ms is not None:
            assert after.watermark_ms >= clocks.watermark_ms
        assert after.origins.keys() == after.seen_ms.keys() == origins.keys()
        # It is never ahead of an origin that is awake, but for what was reached before.
        for name, origin in origins.items():
            awake = origin.idle_ms is None or now_ms - after.seen_ms[name] < origin.idle_ms
            if awake and after.watermark_ms != clocks.watermark_ms:
                own = after.origins[name]
                assert own is not None and after.watermark_ms is not None
                assert after.watermark_ms <= own
        clocks = after


@given(steps)
def test_the_order_in_which_origins_are_declared_does_not_matter(
    steps: list[tuple[dict[str, int], dict[str, Watermark], int]],
) -> None:
    one, other, now_ms = Clocks(), Clocks(), 0
    for latest_us, origins, passed_ms in steps:
        now_ms += passed_ms
        one = one.after(latest_us, origins, now_ms)
        other = other.after(latest_us, dict(reversed(origins.items())), now_ms)
    assert one == other
