"""The commands that look at a checkpoint: what they say, to people and to programs.

The checkpoint is made with the storage API alone: no Spark here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import cairn
from cairn.errors import FunctionError
from cairn.query.epochs import EntryReport
from cairn.report.epoch import Measured, Timings
from cairn.storage.failures import Failures
from cairn.storage.files import encode_segment
from cairn.storage.log import Log, create_or_open_job, new_nonce
from cairn.storage.manifest import (
    EMPTY_VERSION,
    Epoch,
    EpochOperator,
    RangeState,
    Restore,
    SparkPosition,
    StateDecl,
)
from cairn.storage.notes import write_ending
from cairn.storage.pack import write_pack
from cairn.storage.store import open_store
from tests.unit.cli.command_line import call, json_of
from tests.unit.report.reports import measured

NOW_MS = 1_700_000_000_000


def append_epoch(log: Log, term: int, parent: int | None) -> Epoch:
    """One more epoch: as many rows in its delta as its number says."""
    number = (log.last or 0) + 1
    batch = pa.record_batch({"group": np.zeros(number, np.int32), "v": [7] * number})
    segment = encode_segment("delta", "count", {"n": batch}, first_epoch=number)
    (packed,) = write_pack(log.store, [segment], term)
    file = packed.list_for(range(8), first_epoch=number, last_epoch=number)
    before = [] if parent is None else log.epoch(parent).operators["count"].ranges[0].files
    state = RangeState(
        first_group=0, group_count=8, version=EMPTY_VERSION, files=[*before, file],
        state_keys=40, state_entries=60, state_bytes=2048,
    )  # fmt: skip
    entry = EpochOperator(
        uid="count",
        function_version="f" * 32,
        key_types={"k": "bigint"},
        states={
            "n": StateDecl(kind="value", type="bigint"),
            "m": StateDecl(kind="map", type="double", entry_type="string"),
        },
        parallelism=1,
        ranges=[state],
    )
    metrics = measured(
        rows_in=1000,
        rows_out=900,
        state_keys=40,
        state_entries=60,
        delta_bytes=file.length,
        alignment_ms=4,
        subtask_rows=[1000],
    )
    return log.append(
        lambda n: Epoch(
            number=n,
            parent=parent,
            term=term,
            nonce=new_nonce(),
            wall_ms=NOW_MS + n,
            now_ms=NOW_MS,
            watermarks={},
            spark=SparkPosition(
                folder="spark/000000000001", batch_id=n - 2, offsets='v1\n{}\n{"logOffset":3}\n-'
            ),
            operators={"count": entry},
            committables={"out": [{"files": []}, {"files": []}]},
            timings=Timings(run_ms=250.0, attempts=2, process_ms=100.0, alignment_ms={"0": 4}),
            metrics=Measured(operators={"count": metrics}, restored=1),
        )
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Epochs 2, 3 and 4, a rollback to 3, and epoch 6 on top of it."""
    path = tmp_path / "ckpt"
    store = open_store(str(path))
    create_or_open_job(store, "shop", 8)
    log = Log(store)
    term = log.take_over(host="somewhere", pid=17, wall_ms=NOW_MS).term
    for parent in (None, 2, 3):
        append_epoch(log, term, parent)
    log.append(lambda n: Restore(number=n, term=term, nonce=new_nonce(), wall_ms=NOW_MS, epoch=3))
    append_epoch(log, term, 3)
    return path


def test_version_is_the_package_version() -> None:
    assert call("--version").stdout == f"cairn {cairn.__version__}\n"


@pytest.mark.parametrize("command", ["run", "ls", "show", "verify", "demo"])
def test_help_of_every_command_has_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"cairn {command}" in result.stdout.replace("Usage: cairn", "")


def test_ls_walks_the_current_lineage_newest_first(checkpoint: Path) -> None:
    facts = json_of("ls", checkpoint)
    assert [record["epoch"] for record in facts["records"]] == [6, 3, 2]
    newest = facts["records"][0]
    assert newest["parent"] == 3
    assert (newest["rows_in"], newest["rows_per_s"], newest["state_keys"]) == (1000, 4000, 40)
    assert (newest["state_bytes"], newest["epoch_ms"], newest["attempts"]) == (2048, 250.0, 2)
    assert facts["job"]["name"] == "shop"


def test_ls_and_show_say_how_the_job_goes(checkpoint: Path) -> None:
    for command in ("ls", "show"):
        assert json_of(command, checkpoint)["health"]["status"] == "unknown", "it was long ago"
        assert "\nunknown" in call(command, checkpoint).stdout
    store = open_store(str(checkpoint))
    write_ending(store, 1, "stopped", None)
    for command in ("ls", "show"):
        assert json_of(command, checkpoint)["health"]["status"] == "stopped"
        assert "\nstopped" in call(command, checkpoint).stdout


def test_an_error_with_control_characters_does_not_steer_the_terminal(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "new"))
    create_or_open_job(store, "shop", 8)
    term = Log(store).take_over(host="somewhere", pid=17, wall_ms=1).term
    error = FunctionError("raised ValueError: \x1b[2Jgone", key="\x1b]0;title\x07", row="\x9b2J")
    Failures(store, "shop").note_end(error, 2)
    write_ending(store, term, "failed", error)
    for command in ("show", "ls"):
        shown = call(command, tmp_path / "new").stdout
        assert "ValueError: \\x1b[2Jgone" in shown and "\\x1b]0;title\\x07" in shown
        assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_show_of_a_job_that_failed_before_its_first_epoch_says_with_what(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "new"))
    create_or_open_job(store, "shop", 8)
    Log(store).take_over(host="somewhere", pid=17, wall_ms=time.time_ns() // 1_000_000)
    error = FunctionError(
        "process() of operator 'score' raised ValueError: bad\n  at: job.py:12 in process",
        operator="score", key="7", row="Row(k=7)",
    )  # fmt: skip
    Failures(store, "shop").note_end(error, 2)
    write_ending(store, 1, "failed", error)
    for command in ("show", "ls"):
        result = call(command, tmp_path / "new")
        assert result.exit_code == (command == "show"), "there is no epoch to show"
        for text in (
            "failed",
            "process() of operator 'score' raised ValueError: bad",
            "operator: score",
            "row: Row(k=7)",
            "at: job.py:12 in process",
            "next: fix the function",
            "epoch 2, 1 attempt",
        ):
            assert text in result.stdout, (command, text)
    facts = json.loads(call("show", tmp_path / "new", "--json").stdout)
    assert facts["epoch"] is None and facts["health"]["failure"]["operator"] == "score"


def test_show_has_every_field_of_an_operator_also_where_nothing_was_measured(
    checkpoint: Path,
) -> None:
    (operator,) = json_of("show", checkpoint)["operators"].values()
    assert operator["hot_keys"] == operator["group_rows"] == operator["error_sample"] == []
    assert set(EntryReport.__struct_fields__) == operator.keys()


def test_ls_all_shows_takeovers_restores_and_what_was_rolled_back(checkpoint: Path) -> None:
    records = json_of("ls", "--all", checkpoint)["records"]
    kinds = [(r["kind"], r.get("on_lineage")) for r in records]
    assert kinds == [
        ("epoch", True), ("restore", None), ("epoch", False), ("epoch", True), ("epoch", True),
        ("takeover", None),
    ]  # fmt: skip
    text = call("ls", "--all", checkpoint).stdout
    assert "restore of epoch 3" in text
    assert "takeover by somewhere, pid 17" in text
    assert "rolled back" in text


def test_ls_for_people_has_a_line_per_epoch_and_no_markup(checkpoint: Path) -> None:
    result = call("ls", checkpoint)
    assert result.exit_code == 0
    head, status, columns, *rows = result.stdout.splitlines()
    assert status.startswith("unknown  last epoch")
    assert head.startswith("shop  file://")
    assert columns.split()[:3] == ["epoch", "age", "rows"]
    assert [row.split()[0] for row in rows] == ["6", "3", "2"]
    assert "\x1b" not in result.stdout
    assert "2 attempts, 1 restored" in rows[0]


def test_show_tells_the_newest_epoch_or_the_one_asked_for(checkpoint: Path) -> None:
    assert json_of("show", checkpoint)["epoch"] == 6
    facts = json_of("show", checkpoint, 3)
    assert (facts["epoch"], facts["parent"], facts["term"]) == (3, 2, 1)
    assert facts["spark"] == {
        "folder": "spark/000000000001", "batch_id": 1, "offsets": [{"logOffset": 3}, "-"],
    }  # fmt: skip
    assert facts["committables"] == {"out": 2}
    operator = facts["operators"]["count"]
    assert operator["key_types"] == {"k": "bigint"}
    assert operator["states"]["m"]["entry_type"] == "string"
    (part,) = operator["ranges"]
    assert (part["bases"], part["deltas"], part["state_keys"]) == (0, 2, 40)


def test_show_for_people_names_everything(checkpoint: Path) -> None:
    text = call("show", checkpoint, "3").stdout
    for said in ("epoch 3", "2, term 1", "operator count", "k bigint", "string → double", "0–7",
                 "out: 2 committables", '{"logOffset": 3}', "process 100.0",
                 "count 4 ms"):  # fmt: skip
        assert said in text


def test_show_names_subtasks_that_own_no_key_group(checkpoint: Path) -> None:
    log = Log(open_store(str(checkpoint)))
    term = log.take_over(host="here", pid=9, wall_ms=NOW_MS).term
    epoch = append_epoch(log, term, 6)
    entry = epoch.operators["count"]
    nothing = RangeState(
        first_group=8, group_count=0, version=EMPTY_VERSION, files=[],
        state_keys=0, state_entries=0, state_bytes=0,
    )  # fmt: skip
    bounded = msgspec.structs.replace(entry, parallelism=2, ranges=[*entry.ranges, nothing])
    log.append(
        lambda number: msgspec.structs.replace(
            epoch,
            number=number,
            parent=epoch.number,
            nonce=new_nonce(),
            operators={"count": bounded},
        )
    )
    text = call("show", checkpoint).stdout
    assert "none" in text and "8–7" not in text


def test_show_of_an_epoch_that_is_not_there_says_so(checkpoint: Path) -> None:
    result = call("show", checkpoint, 99)
    assert result.exit_code == 1
    assert "has no record 99" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in call("show", checkpoint, 99, "--debug").stderr


def test_a_job_without_epochs_lists_none(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    create_or_open_job(store, "shop", 8)
    assert "no epochs yet" in call("ls", tmp_path).stdout
    assert json_of("ls", tmp_path)["records"] == []
    assert call("show", tmp_path).exit_code == 1


def test_verify_of_a_whole_checkpoint_lists_orphans_and_succeeds(checkpoint: Path) -> None:
    (checkpoint / "state" / "extra").write_bytes(b"123")
    result = call("verify", checkpoint)
    assert result.exit_code == 0
    assert "whole: 6 records, 4 epochs" in result.stdout
    assert "orphan state/extra, 3 B" in result.stdout
    facts = json_of("verify", checkpoint)
    assert facts["ok"] is True
    assert [orphan["path"] for orphan in facts["orphans"]] == ["state/extra"]


def test_verify_of_a_damaged_checkpoint_names_the_file_and_exits_with_1(checkpoint: Path) -> None:
    pack = next((checkpoint / "state").rglob("*.pack"))
    data = bytearray(pack.read_bytes())
    data[20] ^= 1
    pack.write_bytes(bytes(data))
    result = call("verify", checkpoint)
    assert result.exit_code == 1
    assert f"damaged {pack.relative_to(checkpoint)}" in result.stdout
    facts = json.loads(call("verify", checkpoint, "--json").stdout)
    assert [damage["path"] for damage in facts["damage"]] == [str(pack.relative_to(checkpoint))]


def test_a_missing_job_file_is_damage_and_keeps_nobody_from_looking(checkpoint: Path) -> None:
    (checkpoint / "job.json").unlink()
    assert call("verify", checkpoint).exit_code == 1
    assert "job.json is missing" in call("ls", checkpoint).stdout


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_looking_at_nothing_fails_and_makes_no_folder(
    command: str, scheme: str, tmp_path: Path
) -> None:
    result = call(command, f"{scheme}{tmp_path}/nowhere")
    assert result.exit_code == 2
    assert "no checkpoint at" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_checkpoint_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    assert call("ls", tmp_path).exit_code == 2
    assert call("ls", "gopher://x").exit_code == 2
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


def test_looking_does_not_import_pyspark(checkpoint: Path) -> None:
    program = (
        "import sys\n"
        "from cairn.cli import main\n"
        "for command in ('ls', 'show', 'verify'):\n"
        "    try: main([command, sys.argv[1]])\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('pyspark', 'pandas')]\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(checkpoint)], check=True, stdout=subprocess.DEVNULL
    )


JOB = """
def build(spark, where):
    return None
"""


@pytest.mark.parametrize(
    ("target", "args", "said"),
    [
        ("job.py", [], "path/to/job.py:build"),
        ("nothing.py:build", [], "does not exist"),
        ("job.py:bild", [], "found: build"),
        ("job.py:build", [], "build(spark, where) cannot be called"),
        ("job.py:build", ["a", "b"], "given: a b"),
    ],
)
def test_a_wrong_run_command_is_refused_before_spark_starts(
    target: str, args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "job.py").write_text(JOB)
    result = call("run", target, "--checkpoint", "ckpt", "--", *args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "ckpt").exists()


def test_a_job_file_that_raises_is_reported_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "job.py").write_text("x = 1\nraise ValueError('no rows today')\n")
    result = call("run", f"{tmp_path}/job.py:build", "--checkpoint", tmp_path / "ckpt")
    assert result.exit_code == 1
    assert "ValueError: no rows today" in result.stderr
    assert f"{tmp_path}/job.py:2" in result.stderr
    assert "Traceback" not in result.stderr
