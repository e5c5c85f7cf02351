"""`cairn savepoint` and `cairn diff`: what they do and say, without Spark."""

from __future__ import annotations

import datetime as dt
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cairn.cli.checkpoint import split_epoch
from cairn.snapshots import open_savepoint
from cairn.storage.store import open_store
from tests.unit.cli.command_line import call, json_of
from tests.unit.snapshots.checkpoints import GONE, UID, Checkpoint, same_state, state_of, value
from tests.unit.snapshots.savepoints import OBJECTS


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Epochs 2 and 3: a key added, one changed, one removed."""
    made = Checkpoint(OBJECTS, store=open_store(str(tmp_path / "ckpt")))
    made.commit({"n": {1: 1, 2: 2}, "last": {1: {"x": 0.5}}, "o": {1: {"a"}}})
    made.commit({"n": {1: 10, 2: GONE, 3: 3}, "items": {1: ["a"]}, "last": {1: {"y": math.nan}}})
    return made


@pytest.mark.parametrize("command", ["savepoint", "diff"])
def test_help_of_every_command_has_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"cairn {command}" in result.stdout.replace("Usage: cairn", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ckpt", ("ckpt", None)),
        ("ckpt@42", ("ckpt", 42)),
        ("s3://me@lake/ckpt", ("s3://me@lake/ckpt", None)),
        ("s3://me@lake/ckpt@7", ("s3://me@lake/ckpt", 7)),
        ("a@1/b", ("a@1/b", None)),
        ("ckpt@4/", ("ckpt@4/", None)),
        ("ckpt@", ("ckpt@", None)),
        ("ckpt@x1", ("ckpt@x1", None)),
        ("ckpt@-1", ("ckpt@-1", None)),
        ("ckpt@²", ("ckpt@²", None)),
        ("@4", ("@4", None)),
        ("ckpt@3@4", ("ckpt@3", 4)),
    ],
)
def test_only_digits_behind_the_last_at_are_an_epoch(text: str, expected: Any) -> None:
    assert split_epoch(text) == expected


# savepoint


def test_savepoint_writes_the_newest_epoch(checkpoint: Checkpoint, tmp_path: Path) -> None:
    facts = json_of("savepoint", tmp_path / "ckpt", tmp_path / "s")
    savepoint = open_savepoint(str(tmp_path / "s"))
    assert same_state(state_of(savepoint), checkpoint.model)
    assert (facts["epoch"], facts["job"], facts["rows"]) == (3, "shop", savepoint.info.rows)
    assert (facts["bytes"], facts["files"]) == (savepoint.info.bytes, len(savepoint.info.files))
    assert facts["operators"] == {"count": {"n": 2, "items": 1, "last": 2, "o": 1}}
    assert facts["id"] == savepoint.info.id
    assert facts["savepoint"] == f"file://{tmp_path}/s"


def test_savepoint_writes_the_epoch_asked_for(checkpoint: Checkpoint, tmp_path: Path) -> None:
    result = call("savepoint", f"{tmp_path}/ckpt@2", tmp_path / "s")
    assert result.exit_code == 0, result.stderr
    assert "epoch 2 of shop, 4 rows" in result.stdout
    assert "n 2, items 0, last 1, o 1" in result.stdout
    assert "\x1b" not in result.stdout
    assert open_savepoint(str(tmp_path / "s")).info.epoch == 2


def test_savepoint_refuses_a_folder_with_something_in_it(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "notes.txt").write_text("mine")
    result = call("savepoint", tmp_path / "ckpt", tmp_path / "s")
    assert result.exit_code == 1
    assert "needs an empty folder" in result.stderr
    assert "found: notes.txt" in result.stderr
    assert "next:" in result.stderr


def test_savepoint_of_an_epoch_that_is_not_there_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    result = call("savepoint", f"{tmp_path}/ckpt@99", tmp_path / "s")
    assert result.exit_code == 1
    assert "has no record 99" in result.stderr
    assert not (tmp_path / "s").exists()
    assert checkpoint.store.list("holds") == []


@pytest.mark.parametrize("command", [("savepoint", "DEST"), ("diff", "2", "3")])
def test_a_checkpoint_that_is_not_there_is_a_misuse(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    name, *more = command
    arguments = [str(tmp_path / "s") if word == "DEST" else word for word in more]
    result = call(name, tmp_path / "nowhere", *arguments)
    assert result.exit_code == 2
    assert "no checkpoint at" in result.stderr
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("command", ["ls", "show", "dashboard"])
def test_a_savepoint_that_is_taken_for_a_checkpoint_is_called_one(
    command: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    place = tmp_path / "saved"
    assert call("savepoint", tmp_path / "ckpt", place).exit_code == 0
    result = call(command, place)
    assert result.exit_code == 2
    assert "found: a savepoint" in result.stderr
    assert f"next: `cairn state {place}`" in result.stderr


def test_savepoint_to_an_unknown_scheme_is_a_misuse(checkpoint: Checkpoint, tmp_path: Path) -> None:
    result = call("savepoint", tmp_path / "ckpt", "ftp://somewhere/s")
    assert result.exit_code == 2
    assert "unknown scheme" in result.stderr


# diff


def test_diff_counts_and_shows_examples(checkpoint: Checkpoint, tmp_path: Path) -> None:
    facts = json_of("diff", tmp_path / "ckpt", 2, 3)
    assert (facts["before"], facts["after"]) == (2, 3)
    by_state = {each["state"]: each for each in facts["states"]}
    assert list(by_state) == list(OBJECTS)
    n = by_state["n"]
    assert (n["added"], n["changed"], n["removed"], n["only_in"]) == (1, 1, 1, None)
    assert n["examples"] == {
        "added": [{"key": 3, "after": 3}],
        "changed": [{"key": 1, "before": 1, "after": 10}],
        "removed": [{"key": 2, "before": 2}],
    }
    assert by_state["items"]["examples"]["added"] == [{"key": 1, "after": ["a"]}]
    assert by_state["last"]["examples"]["added"] == [{"key": 1, "entry": "y", "after": "NaN"}]
    assert by_state["o"]["added"] == 0


def test_diff_for_people_has_a_line_per_state_and_per_example(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    result = call("diff", tmp_path / "ckpt", 2, 3)
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0].startswith("epoch 2 → epoch 3")
    assert lines[1].split() == ["state", "added", "changed", "removed"]
    assert lines[2].split() == ["count.n", "1", "1", "1"]
    assert lines[3:6] == ["  + 3: 3", "  ~ 1: 1 → 10", "  - 2: 2"]
    assert "  + 1 [y]: NaN" in lines
    assert "\x1b" not in result.stdout


def test_diff_can_be_narrowed_and_limited(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.commit({"n": dict.fromkeys(range(100, 130), 0)})
    facts = json_of("diff", tmp_path / "ckpt", 3, 4, "--state", "n", "--limit", 2)
    (n,) = facts["states"]
    assert (n["added"], len(n["examples"]["added"])) == (30, 2)
    text = call("diff", tmp_path / "ckpt", 3, 4, "--operator", "count", "--limit", 2).stdout
    assert "and 28 more added" in text
    result = call("diff", tmp_path / "ckpt", 3, 4, "--state", "m")
    assert result.exit_code == 1
    assert "count.n, count.items" in result.stderr


def test_diff_never_unpickles(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.commit({"o": {1: GONE, 2: Trap()}})
    (o,) = json_of("diff", tmp_path / "ckpt", 3, 4, "--state", "o")["states"]
    (added,) = o["examples"]["added"]
    assert added["after"].endswith("bytes pickled>")
    assert o["removed"] == 1


class Trap:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a stored object was unpickled",)


def test_values_have_the_form_that_other_commands_print(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "ckpt"))
    checkpoint = Checkpoint({"b": value("binary"), "at": value("timestamp")}, store=store)
    checkpoint.commit({})
    checkpoint.commit({"b": {1: b"\x00\xff"}, "at": {1: dt.datetime(2024, 1, 1, tzinfo=dt.UTC)}})
    compared = json_of("diff", store.url, 2, 3)["states"]
    after = {each["state"]: each["examples"]["added"][0]["after"] for each in compared}
    assert after == {"b": "AP8=", "at": "2024-01-01T00:00:00Z"}
    for name, shown in after.items():
        (row,) = json_of("state", store.url, UID, name)["rows"]
        assert row["value"] == shown


def test_text_that_a_terminal_would_obey_is_escaped(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.commit({"items": {5: ["\x1b[31mred\n", "[bold]x[/bold]"]}})
    text = call("diff", tmp_path / "ckpt", 3, 4, "--state", "items").stdout
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
    assert "[bold]x[/bold]" in text


@pytest.mark.parametrize("words", ["savepoint {0} {1}", "diff {0} 2 3"])
def test_neither_command_loads_spark(words: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    argv = words.format(tmp_path / "ckpt", tmp_path / "s").split()
    program = (
        "import sys\nfrom cairn.cli import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'pyspark', 'py4j'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
