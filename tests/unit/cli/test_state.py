"""`cairn state`: what it lists, shows and refuses, without Spark."""

from __future__ import annotations

import csv
import io
import math
from functools import partial
from pathlib import Path

import pytest

from cairn.snapshots import write_savepoint
from cairn.storage.store import open_store
from tests.unit.cli import command_line
from tests.unit.snapshots.checkpoints import Checkpoint
from tests.unit.snapshots.savepoints import OBJECTS


@pytest.fixture
def ckpt(tmp_path: Path) -> str:
    made = Checkpoint(OBJECTS, store=open_store(str(tmp_path / "ckpt")))
    made.commit({"n": {k: k * 2**52 for k in range(30)}, "o": {1: {"a"}}})
    made.commit({"items": {1: ["a\tb", "☃"]}, "last": {1: {"y": math.nan, "z": None}}, "n": {1: 7}})
    return str(tmp_path / "ckpt")


call = partial(command_line.call, "state")
json_of = partial(command_line.json_of, "state")


def lines_of(*args: object) -> list[str]:
    result = call(*args)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout).splitlines()


def test_states_are_listed_with_kind_types_rows_and_bytes(ckpt: str, tmp_path: Path) -> None:
    facts = json_of(ckpt)
    assert (facts["kind"], facts["epoch"], facts["job"]) == ("epoch", 3, "shop")
    assert [(s["operator"], s["state"], s["kind"], s["type"]) for s in facts["states"]] == [
        ("count", "n", "value", "bigint"),
        ("count", "items", "list", "string"),
        ("count", "last", "map", "string → double"),
        ("count", "o", "value", "object"),
    ]
    n = facts["states"][0]
    assert n["rows"] == 31 and n["bytes"] > 0, "one key was written twice"
    assert n["key"] == [{"name": "k", "type": "bigint"}]
    assert [c["name"] for c in n["columns"]] == ["key_group", "k", "value"]
    shown = lines_of(ckpt)
    assert "epoch 3" in shown[0] and "≤ rows" in shown[1]
    assert shown[2].split()[:5] == ["count.n", "value", "k", "bigint", "bigint"]
    assert lines_of(ckpt, "count") == shown

    write_savepoint(open_store(ckpt), None, str(tmp_path / "saved"))
    saved = json_of(tmp_path / "saved")
    assert saved["kind"] == "savepoint" and saved["states"][0]["rows"] == 30
    assert "savepoint of epoch 3" in lines_of(tmp_path / "saved")[0]


def test_the_first_rows_of_a_state_are_shown_up_to_a_limit(ckpt: str) -> None:
    shown = lines_of(ckpt, "count", "n", "--limit", 4)
    assert len(shown) == 2 + 4 + 1 and shown[-1].startswith("… more: these are the first 4 rows")
    facts = json_of(ckpt, "count", "n", "--limit", 4)
    assert len(facts["rows"]) == 4 and facts["truncated"]
    facts = json_of(ckpt, "count", "n", "--limit", 0)
    assert len(facts["rows"]) == 30 and not facts["truncated"]
    assert {row["k"]: row["value"] for row in facts["rows"]}[9] == str(9 * 2**52)
    assert not json_of(ckpt, "count", "n", "--limit", 30)["truncated"]


def test_odd_values_are_shown_on_one_line_and_objects_stay_pickled(ckpt: str) -> None:
    shown = [line.split() for line in lines_of(ckpt, "count", "items")[1:]]
    assert [line[1:] for line in shown] == [
        ["k", "position", "value"],
        ["1", "0", r"a\tb"],
        ["1", "1", "☃"],
    ]
    assert [line.split()[-1] for line in lines_of(ckpt, "count", "last")[2:]] == ["NaN", "null"]
    assert "bytes pickled>" in lines_of(ckpt, "count", "o")[2]


def test_a_key_is_looked_up(ckpt: str) -> None:
    facts = json_of(ckpt, "count", "n", "--key", 1)
    assert [row["value"] for row in facts["rows"]] == [7]
    assert json_of(ckpt, "count", "n", "--key", 99)["rows"] == []
    assert lines_of(ckpt, "count", "n", "--key", 99)[-1] == "no such key"
    older = json_of(ckpt, "count", "n", "--key", 1, "--epoch", 2)
    assert [row["value"] for row in older["rows"]] == [2**52]


def test_programs_get_every_row_and_people_a_note_about_those_left_out(ckpt: str) -> None:
    assert len(lines_of(ckpt, "count", "n", "--csv")) == 1 + 30
    assert len(lines_of(ckpt, "--sql", "select k from n", "--csv")) == 1 + 30
    assert len(lines_of(ckpt, "count", "n", "--csv", "--limit", 4)) == 1 + 4
    for facts in (json_of(ckpt, "count", "n"), json_of(ckpt, "--sql", "select k from n")):
        assert len(facts["rows"]) == 30 and not facts["truncated"]
    shown = lines_of(ckpt, "count", "n")
    assert len(shown) == 2 + 20 + 1
    assert shown[-1] == "… more: these are the first 20 rows; --limit 0 shows all"


def test_csv_of_a_query_that_gives_too_many_rows_warns_on_stderr(
    ckpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.cli.state.SQL_ROWS_MAX", 7)
    result = call(ckpt, "--sql", "select k from n", "--csv")
    assert len(result.stdout.splitlines()) == 1 + 7
    assert result.stderr == "… more: only the first 7 rows are printed\n"


def test_csv_has_a_head_and_plain_values(ckpt: str) -> None:
    result = call(ckpt, "count", "items", "--csv")
    assert [row[1:] for row in csv.reader(io.StringIO(result.stdout))] == [
        ["k", "position", "value"],
        ["1", "0", "a\tb"],
        ["1", "1", "☃"],
    ]
    result = call(ckpt, "--sql", "select true t, [1, 2] l, null n", "--csv")
    assert list(csv.reader(io.StringIO(result.stdout))) == [["t", "l", "n"], ["true", "[1, 2]", ""]]


def test_sql_is_asked_over_all_states(ckpt: str) -> None:
    facts = json_of(ckpt, "--sql", "select count(*) n from count.n join items using (k)")
    assert facts["rows"] == [{"n": 2}] and facts["columns"] == [{"name": "n", "type": "bigint"}]
    shown = lines_of(ckpt, "--sql", "select k from n order by k", "--limit", 2)
    assert [line.strip() for line in shown[1:-1]] == ["k", "0", "1"]
    assert shown[-1] == "… more: these are the first 2 rows; --limit 0 shows all"
    assert json_of(ckpt, "--sql", "select k from n", "--epoch", 2, "--limit", 1)["truncated"]


@pytest.mark.parametrize(
    "args, code, said",
    [
        (["count", "nope"], 1, "count.n, count.items"),
        (["nope"], 1, "count.n, count.items"),
        (["count", "n", "--key", "x"], 1, "expected: bigint"),
        (["--epoch", "99"], 1, "epoch 99 does not exist"),
        (["--sql", "select * from '/etc/passwd'"], 1, "no state has the name"),
        (["--sql", "select 1", "--key", "1"], 2, "name the states in the query"),
        (["--key", "1"], 2, "OPERATOR STATE"),
        (["--csv"], 2, "--csv prints rows"),
        (["count", "n", "--csv", "--json"], 2, "use one of them"),
    ],
)
def test_what_is_wrong_is_said_with_the_next_step(
    ckpt: str, args: list[str], code: int, said: str
) -> None:
    result = call(ckpt, *args)
    assert result.exit_code == code
    assert said in result.stderr and "next:" in result.stderr
    assert not result.stdout


def test_where_there_is_no_checkpoint_none_is_made(tmp_path: Path) -> None:
    result = call(tmp_path / "missing")
    assert result.exit_code == 2 and "no checkpoint at" in result.stderr
    assert not (tmp_path / "missing").exists()


def test_no_hold_is_left(ckpt: str) -> None:
    call(ckpt, "count", "n")
    call(ckpt, "count", "n", "--key", "x")
    assert not open_store(ckpt).list("holds")
