"""Broadcast state is the same in every subtask, and stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cairn import KeyedProcess, state
from cairn.cli import app
from cairn.errors import FunctionError, PlanError, StateNotFoundError, StateSchemaError
from cairn.protocol.messages import Ack
from cairn.protocol.scoped_state import shared_uid
from cairn.snapshots import EpochReader
from cairn.snapshots.diff import diff_epochs
from cairn.snapshots.rollback import rollback
from tests.unit.slot.scoped_job import Alerts, ScopedJob

ROWS = [(k, k) for k in range(10)]


def make(scratch: Path, parallelism: int = 3, *given: Any, **more: Any) -> ScopedJob:
    job = ScopedJob(scratch)
    job.lead(parallelism, *given, **more)
    return job


def test_rows_see_the_rules_of_their_own_epoch_in_every_subtask(tmp_path: Path) -> None:
    job = make(tmp_path, 5)
    said = job.run(ROWS, [("b", 2), ("a", 1)])
    assert {row[3] for row in said} == {"a=1,b=2"}
    assert len({row[2] for row in said}) > 1, "several subtasks"
    said = job.run(ROWS, [("a", None), ("c", 3)])
    assert {row[3] for row in said} == {"b=2,c=3"}
    assert job.replicas() == [{"b": 2, "c": 3}] * 5
    assert job.rules() == {"b": 2, "c": 3}


def test_the_last_word_counts_everywhere(tmp_path: Path) -> None:
    job = make(tmp_path)
    job.run([], [("a", 1), ("a", 5), ("b", 7), ("b", None)])
    assert job.replicas() == [{"a": 5}] * 3


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 20], ids=["as objects", "in packs"])
def test_it_is_stored_once_whatever_the_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes_max: int
) -> None:
    monkeypatch.setattr("cairn.driver.coordinator.epoch.INLINE_BYTES_MAX", inline_bytes_max)
    stored: dict[int, Any] = {}
    for parallelism in (1, 5):
        job = make(tmp_path, parallelism)
        for epoch in range(3):
            job.run([], [(f"r{epoch}-{n}", n) for n in range(50)])
        objects = [(found.path.split("/")[-1], found.size) for found in job.store.list("state/")]
        stored[parallelism] = sorted(objects), job.shared.files
        metrics = job.newest.metrics.operators
        assert metrics[shared_uid("alerts")].entries_changed == 50
        assert metrics[shared_uid("alerts")].state_entries == 150
        assert metrics["alerts"].rows_in == 50
    assert len(stored[1][0]) == 3
    assert stored[1] == stored[5]


def test_all_but_one_subtask_send_the_name_of_their_changes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(tmp_path, 3)
    acks: list[Ack] = []
    execute = job.cluster.execute

    def watched(sources: Any, begin: Any) -> Any:
        outcome = execute(sources, begin)
        acks.extend(outcome.acks)
        return outcome

    monkeypatch.setattr(job.cluster, "execute", watched)
    job.run(ROWS, [("a", 1)])
    deltas = [op.delta for ack in acks for op in ack.operators if op.uid == shared_uid("alerts")]
    assert [delta is not None and delta.data is not None for delta in deltas] == [
        True,
        False,
        False,
    ]
    assert len({delta and delta.id for delta in deltas}) == 1
    assert [delta and delta.length for delta in deltas][1:] == [0, 0]


class Different(Alerts):
    """Writes what depends on where it runs."""

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        ctx.broadcast[row.name] = row.level if ctx.subtask != 1 else -1


def test_subtasks_that_disagree_are_no_epoch(tmp_path: Path) -> None:
    job = make(tmp_path, 3, None, Different())
    job.run(ROWS)
    before = job.newest.number
    with pytest.raises(FunctionError, match=r"operator 'alerts'(.|\n)*subtasks \[1\]") as caught:
        job.run(ROWS, [("a", 1)])
    assert "only on the rows and on ctx.broadcast" in str(caught.value)
    assert caught.value.facts["attempts"] == 4
    assert job.newest.number == before


ODD_ONE_OUT: list[int] = []


class DifferentOnce(Alerts):
    """As when a task of Spark's has run twice, and got its rows in another order."""

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        is_odd = ctx.subtask in ODD_ONE_OUT
        if is_odd:
            ODD_ONE_OUT.remove(ctx.subtask)
        ctx.broadcast[row.name] = -1 if is_odd else row.level


@pytest.mark.parametrize("subtask", [0, 2])
def test_subtasks_that_disagree_once_agree_in_the_next_attempt(
    tmp_path: Path, subtask: int
) -> None:
    job = make(tmp_path, 3, None, DifferentOnce())
    ODD_ONE_OUT.append(subtask)
    assert {row[3] for row in job.run(ROWS, [("a", 1)])} == {"a=1"}
    assert job.newest.timings.attempts == 2
    assert job.replicas() == [{"a": 1}] * 3 and job.rules() == {"a": 1}


def test_a_subtask_that_writes_nothing_where_others_do_disagrees_too(tmp_path: Path) -> None:
    class Silent(Alerts):
        def process_broadcast(self, row: Any, ctx: Any) -> Any:
            if ctx.subtask < 2:
                ctx.broadcast[row.name] = row.level

    job = make(tmp_path, 3, None, Silent())
    with pytest.raises(FunctionError, match=r"subtasks \[2\] differ"):
        job.run([], [("a", 1)])


@pytest.mark.parametrize("failing", [{0: "a"}, {1: "a", 2: "a"}, {0: "a", 1: "b", 2: "a"}])
def test_a_row_that_is_put_aside_in_some_subtasks_only_is_no_epoch(
    failing: dict[int, str], tmp_path: Path
) -> None:
    class Fails(Alerts):
        def process_broadcast(self, row: Any, ctx: Any) -> Any:
            if failing.get(ctx.subtask) == row.name:
                raise ValueError(row.name)

    job = ScopedJob(tmp_path)
    job.lead(3, None, Fails(), on_error="dead-letter")
    with pytest.raises(FunctionError, match=r"different rows(.|\n)*every subtask, or in none"):
        job.run(ROWS, [("a", 1), ("b", 1)])
    job.run(ROWS, [("c", 1)])
    assert job.newest.metrics.operators["alerts"].error_rows == 0


def test_a_row_that_all_subtasks_put_aside_counts_once(tmp_path: Path) -> None:
    class Fails(Alerts):
        def process_broadcast(self, row: Any, ctx: Any) -> Any:
            super().process_broadcast(row, ctx)
            if row.name == "b":
                raise ValueError(row.name)

    job = ScopedJob(tmp_path)
    job.lead(3, None, Fails(), on_error="dead-letter")
    job.run(ROWS, [("a", 1), ("b", 1), ("c", 1), ("b", 2)])
    assert job.newest.metrics.operators["alerts"].error_rows == 2
    assert job.rules() == {"a": 1, "c": 1}


def test_the_order_in_which_keys_are_written_makes_no_difference(tmp_path: Path) -> None:
    class Scattered(Alerts):
        def process_broadcast(self, row: Any, ctx: Any) -> Any:
            names = ["x", "y", "z"]
            for name in names if ctx.subtask else reversed(names):
                ctx.broadcast[name] = row.level

    job = make(tmp_path, 3, None, Scattered())
    job.run([], [("", 1)])
    assert job.replicas() == [{"x": 1, "y": 1, "z": 1}] * 3


def test_a_slot_that_died_gets_it_back(tmp_path: Path) -> None:
    job = make(tmp_path)
    job.run(ROWS, [("a", 1)])
    job.run([], [("b", 2)])
    job.cluster.kill(1)
    said = job.run(ROWS)
    assert {row[3] for row in said} == {"a=1,b=2"}
    assert job.newest.metrics.restored == 1
    assert job.replicas() == [{"a": 1, "b": 2}] * 3


def test_a_rescale_hands_it_to_new_subtasks_and_writes_nothing(tmp_path: Path) -> None:
    job = make(tmp_path, 2)
    job.run(ROWS, [("a", 1)])
    files, version = job.shared.files, job.shared.version
    for parallelism in (5, 3):
        job.coordinator.subtasks.rescale(parallelism)
        said = job.run(ROWS)
        assert {row[3] for row in said} == {"a=1"}
        assert job.replicas() == [{"a": 1}] * parallelism
        assert (job.shared.files, job.shared.version) == (files, version)
    job.run([], [("a", 2)])
    assert job.replicas() == [{"a": 2}] * 3


def test_an_attempt_that_failed_leaves_no_rule_behind(tmp_path: Path) -> None:
    job = make(tmp_path)
    job.run([], [("a", 1)])
    job.failures.append(lambda: None)
    assert {row[3] for row in job.run(ROWS, [("b", 2)])} == {"a=1,b=2"}
    rollback(job.store, job.newest.number - 1)
    job.lead(2)
    assert {row[3] for row in job.run(ROWS)} == {"a=1"}


def test_bases_and_merges_of_it_are_written_by_one_subtask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "1")
    job = make(tmp_path, 3)
    for epoch in range(12):
        job.run([], [("a", epoch), (f"b{epoch}", 0)])
        for slot in job.cluster.slots.values():
            written = [file.uid for file in slot.compactor.list_unconfirmed()]
            assert slot is job.cluster.slots[0] or shared_uid("alerts") not in written
            slot.compactor.work()
    assert any(ref.kind == "base" for ref in job.shared.files)
    assert len(job.shared.files) < 6
    job.kill()
    job.run()
    assert job.rules() == {"a": 11, **{f"b{epoch}": 0 for epoch in range(12)}}
    assert job.replicas() == [job.rules()] * 3


def test_it_is_found_under_the_uid_of_its_operator(tmp_path: Path) -> None:
    job = make(tmp_path)
    job.run(ROWS, [("a", 1)])
    first = job.newest.number
    job.run([], [("a", 2), ("b", 3)])
    with EpochReader(job.store, job.newest) as reader:
        with pytest.raises(StateNotFoundError, match="found: n, rules"):
            list(reader.rows("alerts", "nothing"))
        assert sum(batch.num_rows for batch in reader.rows("alerts", "n")) == 10
    diffs = diff_epochs(job.store, first, job.newest.number, operator="alerts", state="rules")
    (rules,) = [diff for diff in diffs if diff.state == "rules"]
    assert (rules.added, rules.changed, rules.removed) == (1, 1, 0)


class Anonymous(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return row.k, row.v, ctx.subtask, str(dict(ctx.broadcast))

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        ctx.broadcast[row.name] = row.level


def test_it_needs_no_attribute(tmp_path: Path) -> None:
    declaration = state.Broadcast("string", "long")
    declaration.name = "broadcast"
    job = make(tmp_path, 2, None, Anonymous(), broadcast=declaration)
    assert {row[3] for row in job.run(ROWS, [("a", 1)])} == {"{'a': 1}"}
    assert set(job.newest.operators[shared_uid("alerts")].states) == {"broadcast"}


def failing(tmp_path: Path, function: Any, match: str) -> None:
    job = make(tmp_path, 2, None, function)
    with pytest.raises(FunctionError, match=match):
        job.run(ROWS, [("a", 1)])


def test_a_write_while_a_row_is_processed_is_refused(tmp_path: Path) -> None:
    class Writes(Alerts):
        def process(self, row: Any, ctx: Any) -> Any:
            self.rules["a"] = 2

    failing(tmp_path, Writes(), r"'rules' is written where(.|\n)*next: send the change as a row")


def test_state_of_a_key_is_refused_where_no_key_is_at_hand(tmp_path: Path) -> None:
    class Counts(Alerts):
        def process_broadcast(self, row: Any, ctx: Any) -> Any:
            self.n.set(1)

    failing(tmp_path, Counts(), r"state of a key is used in process_broadcast")


def test_nothing_is_no_value_and_no_key(tmp_path: Path) -> None:
    class Nothing(Alerts):
        def process_broadcast(self, row: Any, ctx: Any) -> Any:
            ctx.broadcast[row.name] = None

    failing(tmp_path, Nothing(), "a value cannot be None; delete the key instead")


class Reminded(Alerts):
    """Tells in a timer what the rules are."""

    def process(self, row: Any, ctx: Any) -> Any:
        ctx.timers.processing(after=0)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        if ctx.epoch > 2:
            return ctx.key, 0, ctx.subtask, ",".join(ctx.broadcast)
        ctx.timers.processing(at=ctx.now_ms + 1)
        return None


def test_timers_come_after_the_rules_of_their_epoch(tmp_path: Path) -> None:
    job = make(tmp_path, 3, None, Reminded())
    job.run(ROWS, [("a", 1)])
    job.coordinator._clock = lambda: job.newest.now_ms + 10
    said = job.run([], [("b", 2)])
    assert len(said) == 10 and {row[3] for row in said} == {"a,b"}


# From one program to the next


class Without(KeyedProcess[Any]):
    n = state.Value("long")

    def process(self, row: Any, ctx: Any) -> Any:
        pass

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        pass


def test_a_program_without_it_is_refused_unless_it_may_be_lost(tmp_path: Path) -> None:
    job = make(tmp_path)
    job.run(ROWS, [("a", 1)])
    with pytest.raises(PlanError, match="'alerts': the epoch holds broadcast state 'rules'"):
        job.lead(2, alerts=Without(), broadcast=None)
    job.lead(2, alerts=Without(), broadcast=None, allow_dropped_state=True)
    job.run(ROWS, [("b", 2)])
    assert shared_uid("alerts") not in job.newest.operators
    job.lead(3)
    assert {row[3] for row in job.run(ROWS)} == {""}, "it does not come back"


def test_its_keys_keep_their_type(tmp_path: Path) -> None:
    job = make(tmp_path)
    job.run(ROWS, [("a", 1)])
    other = state.Broadcast("long", "long")
    other.name = "rules"
    with pytest.raises(StateSchemaError, match=r"broadcast state 'rules'(.|\n)*keys as string"):
        job.lead(2, broadcast=other)


def test_its_values_may_get_another_type(tmp_path: Path) -> None:
    job = make(tmp_path)
    job.run(ROWS, [("a", 1), ("b", 2)])
    wider = state.Broadcast("string", "string", migrate=lambda level: f"<{level}>")
    wider.name = "rules"

    class Text(Alerts):
        def process_broadcast(self, row: Any, ctx: Any) -> Any:
            ctx.broadcast[row.name] = "new"

    job.lead(5, alerts=Text(), broadcast=wider)
    job.run(ROWS)
    assert job.rules() == {"a": "<1>", "b": "<2>"}
    assert [ref.kind for ref in job.shared.files] == ["base"], "written anew, once"
    job.kill()
    job.run([], [("b", 0)])
    assert job.replicas() == [{"a": "<1>", "b": "new"}] * 5


def test_show_says_whose_state_is(tmp_path: Path) -> None:
    job = ScopedJob(tmp_path, f"file://{tmp_path}/checkpoint")
    job.lead(2)
    job.run(ROWS, [("a", 1)])
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "checkpoint")])
    assert shown.exit_code == 0
    text = " ".join(shown.stdout.split())
    assert "operator alerts:broadcast the same in every subtask" in text
    assert "rules broadcast string → bigint" in text
    assert "operator notes a list per subtask" in text
    assert "own operator list bigint" in text
    assert "operator alerts keyed by k bigint" in text
