"""Sources keep their place by name: others may be added, moved, dropped or reset beside them."""

from __future__ import annotations

import collections
import operator
from pathlib import Path

import pytest

from cairn import Job, KeyedProcess, PlanError, RestoreError, sinks, state
from cairn.storage.log import record_path
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from tests.marks import for_soak
from tests.spark.support import epochs, finish, published, stored_state

ROWS = "id string, k bigint"


class Count(KeyedProcess):
    n = state.Reducing("bigint", operator.add)

    def process(self, row, ctx):
        self.n.add(1)
        return (row.id, self.n.get())


def made_from(spark, tmp_path, **inputs):
    """A job that counts the rows of all sources per key, in the order given."""
    job = Job("sources", max_parallelism=8)
    streams = [job.source(name, each.stream(spark)) for name, each in inputs.items()]
    rows = streams[0].union(*streams[1:]) if len(streams) > 1 else streams[0]
    counted = rows.key_by("k").process(Count(), schema="id string, n bigint", uid="count")
    counted.sink_to(sinks.Files(str(tmp_path / "out")), uid="out")
    return job


def times_seen(tmp_path):
    return collections.Counter(row["id"] for row in published(tmp_path / "out"))


def once(*names):
    return collections.Counter(names)


def test_sources_added_and_moved_lose_and_repeat_nothing(spark, make_input, tmp_path):
    a, b = make_input(ROWS), make_input(ROWS)
    checkpoint = tmp_path / "ckpt"
    a.add(("a0", 1), ("a1", 2)).add(("a2", 1))
    finish(made_from(spark, tmp_path, a=a), checkpoint)
    assert times_seen(tmp_path) == once("a0", "a1", "a2")

    # A second one, which has rows already; the first has a new one.
    b.add(("b0", 1)).add(("b1", 2))
    a.add(("a3", 2))
    finish(made_from(spark, tmp_path, a=a, b=b), checkpoint)
    assert times_seen(tmp_path) == once("a0", "a1", "a2", "a3", "b0", "b1")
    assert epochs(checkpoint)[-1].spark.sources == ["a", "b"]

    # The other way round, with more rows in each.
    a.add(("a4", 1))
    b.add(("b2", 2)).add(("b3", 1))
    job = made_from(spark, tmp_path, b=b, a=a)
    finish(job, checkpoint)
    everything = once(*(f"a{n}" for n in range(5)), *(f"b{n}" for n in range(4)))
    assert times_seen(tmp_path) == everything
    assert stored_state(job, checkpoint)["count"]["n"] == {1: 5, 2: 4}

    # And once more as it is: it goes on in the folder that was laid out.
    a.add(("a5", 1))
    finish(made_from(spark, tmp_path, b=b, a=a), checkpoint)
    assert times_seen(tmp_path) == everything + once("a5")
    folders = [epoch.spark.folder for epoch in epochs(checkpoint)]
    assert folders[-1] == folders[-2]


def test_a_dropped_source_is_refused_unless_its_position_may_be_lost(spark, make_input, tmp_path):
    a, b = make_input(ROWS), make_input(ROWS)
    a.add(("a0", 1))
    b.add(("b0", 1))
    checkpoint = tmp_path / "ckpt"
    finish(made_from(spark, tmp_path, a=a, b=b), checkpoint)
    with pytest.raises(PlanError, match="the job does not read a"):
        finish(made_from(spark, tmp_path, b=b), checkpoint)
    b.add(("b1", 1))
    finish(made_from(spark, tmp_path, b=b), checkpoint, allow_dropped_state=True)
    assert times_seen(tmp_path) == once("a0", "b0", "b1")


def test_a_source_that_is_reset_is_read_again_and_the_others_are_not(spark, make_input, tmp_path):
    a, b = make_input(ROWS), make_input(ROWS)
    a.add(("a0", 1))
    b.add(("b0", 1))
    checkpoint = tmp_path / "ckpt"
    finish(made_from(spark, tmp_path, a=a, b=b), checkpoint)
    job = made_from(spark, tmp_path, a=a, b=b)
    finish(job, checkpoint, reset_sources=("b",))
    assert times_seen(tmp_path) == {"a0": 1, "b0": 2}
    assert stored_state(job, checkpoint)["count"]["n"] == {1: 3}


def cut(path):
    path.write_text(path.read_text().split("\n")[0])


# Of the newest list of files, or of the compact one.
@pytest.mark.parametrize(
    "harms",
    [
        [(cut, True), (Path.unlink, False)],
        for_soak([(cut, True), (cut, False), (Path.unlink, True), (Path.unlink, False)]),
    ],
    ids=["some", "all"],
)
def test_damage_to_spark_s_folder_and_to_the_log_repeats_no_row(spark, make_input, tmp_path, harms):
    a = make_input(ROWS)
    checkpoint = tmp_path / "ckpt"
    names = [f"a{number}" for number in range(12)]
    for name in names:
        a.add((name, 1))
    finish(made_from(spark, tmp_path, a=a), checkpoint)

    def damaged(path):
        report = verify(open_store(str(checkpoint)))
        return str(path.relative_to(checkpoint)) in {damage.path for damage in report.damage}

    for damage, of_newest in harms:
        number = len(names) - 1 if of_newest else 9
        folder = checkpoint / epochs(checkpoint)[-1].spark.folder
        there = [*folder.glob(f"sources/0/{number}"), *folder.glob(f"sources/0/{number}.c*")]
        damage(there[0])
        # Hadoop's own checksum beside it is wrong from now on, and nobody needs it.
        (there[0].parent / f".{there[0].name}.crc").unlink(missing_ok=True)
        assert damaged(there[0])
        names.append(f"a{len(names)}")
        a.add((names[-1], 1))
        finish(made_from(spark, tmp_path, a=a), checkpoint)
        assert times_seen(tmp_path) == once(*names)
        assert verify(open_store(str(checkpoint))).ok

    newest = checkpoint / record_path(epochs(checkpoint)[-1].number)
    record = newest.read_bytes()
    newest.unlink()
    with pytest.raises(RestoreError, match="sink 'out' has published epoch"):
        finish(made_from(spark, tmp_path, a=a), checkpoint)
    newest.write_bytes(record)
    a.add(("last", 1))
    finish(made_from(spark, tmp_path, a=a), checkpoint)
    assert times_seen(tmp_path) == once(*names, "last")
    before, after = (epoch.spark.folder for epoch in epochs(checkpoint)[-2:])
    assert before == after, "a folder that is whole is gone on with"
