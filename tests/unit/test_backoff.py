from __future__ import annotations

from cairn.backoff import backoff_s, jitter


def test_waits_grow_by_the_factor_up_to_the_limit() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 4)] == [0.1, 0.2, 0.4, 0.8]
    assert [backoff_s(n, first_s=0.5, factor=4, max_s=3) for n in (1, 2, 3)] == [0.5, 2, 3]


def test_a_million_failures_wait_no_longer_than_the_limit() -> None:
    assert backoff_s(1_000_000) == 5.0


def test_jitter_leaves_at_least_half_of_a_wait() -> None:
    assert all(0.5 <= jitter(1.0) <= 1.0 for _ in range(100))
