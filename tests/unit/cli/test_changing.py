"""The commands that change a checkpoint: what they say first, ask, do and refuse."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.cli.checkpoint import split_epoch
from cairn.report.epoch import Measured, SubtaskTimes
from cairn.snapshots import write_savepoint
from cairn.snapshots.branch import branch
from cairn.snapshots.rollback import rollback
from cairn.storage.log import Log, read_job
from cairn.storage.notes import SavepointNote, write_savepoint_note
from cairn.storage.spark_log import lay_out_from
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify
from tests.unit.cli.command_line import call, json_of
from tests.unit.report.reports import measured
from tests.unit.storage.leading import Driver, lay_spark_folder, new_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Epochs 2 to 7."""
    store = new_store(str(tmp_path / "ckpt"))
    Driver(store, keep=10, folder=lay_spark_folder(store, 1)).epochs(6)
    return store


def newest(store: Store) -> int:
    epoch = Log(store).newest_epoch()
    assert epoch is not None
    return epoch.number


@pytest.mark.parametrize("command", ["rollback", "branch", "rm"])
def test_help_of_every_command_has_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"cairn {command}" in result.stdout.replace("Usage: cairn", "")


@pytest.mark.parametrize(
    ("text", "url", "epoch"),
    [
        ("ckpt", "ckpt", None),
        ("ckpt@42", "ckpt", 42),
        ("s3://user@host/x", "s3://user@host/x", None),
        ("s3://user@host/x@7", "s3://user@host/x", 7),
        ("a@1@2", "a@1", 2),
        ("@3", "@3", None),
        ("ckpt@", "ckpt@", None),
    ],
)
def test_an_epoch_is_the_digits_after_the_last_at_sign(
    text: str, url: str, epoch: int | None
) -> None:
    assert split_epoch(text) == (url, epoch)


# rollback


def test_rollback_says_what_it_undoes_and_which_output_stays(store: Store) -> None:
    result = call("rollback", store.url, 4, "--yes")
    assert result.exit_code == 0, result.stderr
    for said in (
        "from epoch 7 to 4",
        "3 epochs: 7, 6, 5",
        "30 rows in",
        "published out: 2 committables of 2 epochs: 7, 5",
        "what is published stays; the replay publishes it again",
        'source topic after {"topic":{"0":7}}',
        "a job that runs on this checkpoint is stopped",
        "rolled back: epoch 4 is the newest one (record 8)",
    ):
        assert said in result.stdout
    assert newest(store) == 4


def test_rollback_for_programs_tells_the_same(store: Store) -> None:
    facts = json_of("rollback", store.url, 4, "--yes")
    assert (facts["epoch"], facts["newest"], facts["record"], facts["rows"]) == (4, 7, 8, 30)
    assert [undone["epoch"] for undone in facts["undone"]] == [7, 6, 5]
    assert facts["output"] == {
        "out": [{"epoch": 7, "committables": 1}, {"epoch": 5, "committables": 1}]
    }


@pytest.mark.parametrize("arguments", [["rollback", 4], ["rm"]])
def test_without_a_terminal_and_without_yes_nothing_is_done(
    store: Store, arguments: list[Any]
) -> None:
    command, *rest = arguments
    before = store.list()
    result = call(command, store.url, *rest)
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert store.list() == before


def at_a_terminal(answer: str, *args: str) -> subprocess.CompletedProcess[str]:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    try:
        return subprocess.run(
            [sys.executable, "-m", "cairn", *args],
            stdin=theirs, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(theirs)


def test_at_a_terminal_the_answer_decides(store: Store) -> None:
    done = at_a_terminal("n", "rollback", store.url, "4")
    assert done.returncode == 1
    assert "3 epochs: 7, 6, 5" in done.stdout and "Roll back?" in done.stdout
    assert newest(store) == 7
    assert at_a_terminal("y", "rollback", store.url, "4").returncode == 0
    assert newest(store) == 4


@pytest.mark.parametrize(("epoch", "said"), [(7, "nothing to undo"), (1, ""), (99, "no record 99")])
def test_rollback_to_no_older_epoch_is_refused(store: Store, epoch: int, said: str) -> None:
    result = call("rollback", store.url, epoch, "--yes")
    assert result.exit_code == 1
    assert said in result.stderr and "Traceback" not in result.stderr
    assert newest(store) == 7


# branch and rm


def test_branch_of_an_epoch_says_what_is_shared(store: Store, tmp_path: Path) -> None:
    result = call("branch", f"{store.url}@4", tmp_path / "b")
    assert result.exit_code == 0, result.stderr
    assert "epoch 4 is epoch 1 of " in result.stdout and "3 objects" in result.stdout
    facts = json_of("branch", store.url, tmp_path / "c")
    assert facts["parent_epoch"] == 7 and facts["parent_url"] == store.url
    job = read_job(open_store(str(tmp_path / "c")))
    assert job is not None and job.job_id == facts["job_id"]
    assert call("branch", store.url, tmp_path / "c").exit_code == 1
    assert call("branch", tmp_path / "nowhere", tmp_path / "d").exit_code == 2


def test_branch_takes_sparks_log_from_elsewhere(tmp_path: Path) -> None:
    store, spark = new_store(str(tmp_path / "ckpt")), open_store(str(tmp_path / "spark"))
    Driver(store, folder=lay_spark_folder(spark, 1)).epochs(2)
    result = call(
        "branch", store.url, tmp_path / "b", "--spark-checkpoint", spark.url,
        "--new-spark-checkpoint", tmp_path / "new",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert open_store(str(tmp_path / "new")).exists("spark/000000000001/sources/0/0")


def test_ls_and_show_of_a_branch_say_where_it_came_from(store: Store, tmp_path: Path) -> None:
    branch(store, 4, str(tmp_path / "b"))
    for command in ("ls", "show"):
        text = call(command, tmp_path / "b").stdout
        assert f"branch of epoch 4, {store.url}" in text
    assert f"* in {store.url}" in call("show", tmp_path / "b").stdout
    (file, *_) = json_of("show", tmp_path / "b")["operators"]["op"]["ranges"][0]["files"]
    assert file["store"] == store.url
    assert json_of("ls", tmp_path / "b")["job"]["origin"]["epoch"] == 4


def test_rm_removes_a_checkpoint(store: Store, tmp_path: Path) -> None:
    result = call("rm", store.url, "--yes")
    assert result.exit_code == 0, result.stderr
    assert "removing the checkpoint at" in result.stdout and "removed: " in result.stdout
    assert not (tmp_path / "ckpt").exists()
    assert call("rm", store.url, "--yes").exit_code == 2


def test_rm_of_a_parent_names_its_branches_and_does_nothing_without_force(
    store: Store, tmp_path: Path
) -> None:
    branch(store, None, str(tmp_path / "b"))
    before = store.list()
    result = call("rm", store.url, "--yes")
    assert result.exit_code == 1
    assert f"branch: file://{tmp_path}/b" in result.stderr
    assert store.list() == before
    assert call("rm", tmp_path / "b", "--yes").exit_code == 0
    assert json_of("rm", store.url, "--yes")["kind"] == "checkpoint"
    assert not (tmp_path / "ckpt").exists()


def test_rm_with_force_removes_a_parent_under_its_branch(store: Store, tmp_path: Path) -> None:
    branch(store, None, str(tmp_path / "b"))
    assert call("rm", store.url, "--yes", "--force").exit_code == 0
    assert call("verify", tmp_path / "b").exit_code == 1


def test_verify_and_rm_take_a_savepoint_too(store: Store, tmp_path: Path) -> None:
    write_savepoint(store, None, str(tmp_path / "s"))
    facts = json_of("verify", tmp_path / "s")
    assert (facts["kind"], facts["ok"], facts["epoch"]) == ("savepoint", True, 7)
    assert "whole: savepoint of epoch 7" in call("verify", tmp_path / "s").stdout
    source = tmp_path / "s" / "sources" / "0" / "0"
    source.write_bytes(b"other")
    result = call("verify", tmp_path / "s")
    assert result.exit_code == 1
    assert "damaged sources/0/0" in result.stdout
    assert json_of("rm", tmp_path / "s", "--yes")["kind"] == "savepoint"
    assert not (tmp_path / "s").exists()


def test_what_is_half_removed_is_no_checkpoint_and_rm_goes_on(store: Store, tmp_path: Path) -> None:
    store.put("removing.json", b"{}")
    store.delete(["job.json"])
    for command in ("ls", "show", "verify"):
        result = call(command, store.url)
        assert result.exit_code == 2
        assert "cairn rm" in result.stderr
    assert call("rm", store.url, "--yes").exit_code == 0
    assert not (tmp_path / "ckpt").exists()


def test_rm_of_a_folder_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("hello")
    assert call("rm", tmp_path, "--yes").exit_code == 2
    assert (tmp_path / "letter.txt").exists()


def test_verify_tells_stale_holds_and_what_to_do(store: Store, tmp_path: Path) -> None:
    info = branch(store, None, str(tmp_path / "b"))
    assert "stale hold" not in call("verify", store.url).stdout
    subprocess.run(["rm", "-r", str(tmp_path / "b")], check=True)
    result = call("verify", store.url)
    assert result.exit_code == 0
    assert f"stale hold holds/branch-{info.job_id}.json: no branch at" in result.stdout
    assert f"delete {store.url}/holds/branch-{info.job_id}.json" in result.stdout
    assert len(json_of("verify", store.url)["stale_holds"]) == 1
    assert verify(store).ok


def test_verify_shows_damaged_and_stale_notes(store: Store, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    write_savepoint_note(store, SavepointNote(id="a", url=gone, epoch=2, created_ms=3, bytes=4))
    result = call("verify", store.url)
    assert result.exit_code == 0
    note = "savepoints/0000000000003-a.json"
    assert f"stale note {note}: no savepoint at {gone}" in result.stdout
    assert [found["path"] for found in json_of("verify", store.url)["stale_notes"]] == [note]
    store.put("graph/000000000001.json", b"{")
    result = call("verify", store.url)
    assert result.exit_code == 1
    assert "damaged graph/000000000001.json: this note cannot be read" in result.stdout


def test_verify_checks_spark_s_folder_where_it_lies(store: Store, tmp_path: Path) -> None:
    epoch = Log(store).newest_epoch()
    assert epoch is not None
    other = open_store(str(tmp_path / "spark's"))
    lay_out_from(epoch.spark, {}, epoch.spark.folder, other)
    place = ("verify", store.url, "--spark-checkpoint", other.url)
    assert call(*place).exit_code == 0
    path = f"{epoch.spark.folder}/offsets/{epoch.spark.batch_id}"
    other.put(path, b"junk")
    result = call(*place)
    assert result.exit_code == 1
    assert f"damaged {path}: a file of Spark's streaming checkpoint is damaged" in result.stdout


# ls and show


def test_ls_marks_the_epoch_that_was_gone_back_to(store: Store) -> None:
    rollback(store, 4)
    assert json_of("ls", store.url)["records"][0]["restored_by"] == 8
    Driver(store).epochs(1)
    records = json_of("ls", store.url)["records"]
    assert [(r["epoch"], r["restored_by"]) for r in records] == [
        (10, None), (4, 8), (3, None), (2, None),
    ]  # fmt: skip
    assert "restored by 8" in call("ls", store.url).stdout
    text = call("ls", "--all", store.url).stdout
    assert "restore of epoch 4" in text and "takeover by h, pid 1" in text


def test_show_explains_lineage_sources_and_files(store: Store) -> None:
    facts = json_of("show", store.url, 4)
    assert (facts["lineage"], facts["on_lineage"], facts["newest"]) == ([3, 2], True, 7)
    assert facts["sources"] == [{"name": "topic", "offset": {"topic": {"0": 7}}}]
    assert facts["watermarks"] == {"w": 5}
    (part,) = facts["operators"]["op"]["ranges"]
    assert part["subtask"] == 0
    assert [(f["kind"], f["tier"], f["rows"], f["first_epoch"]) for f in part["files"]] == [
        ("delta", 0, 1, 2), ("delta", 0, 1, 3), ("delta", 0, 1, 4),
    ]  # fmt: skip
    assert all(store.exists(file["path"]) for file in part["files"])
    text = call("show", store.url, 4).stdout
    for said in ("current: 4 ← 3 ← 2", 'source topic  {"topic": {"0": 7}}', "0–7", "watermark"):
        assert said in text


def test_show_tells_an_epoch_that_was_rolled_back_from_one_that_was_restored(store: Store) -> None:
    rollback(store, 4)
    assert "rolled back" in call("show", store.url, 6).stdout
    assert "newest, restored by record 8" in call("show", store.url, 4).stdout


def with_times(store: Store) -> None:
    log = Log(store)
    epoch = log.epoch(7)
    subtasks = [
        SubtaskTimes(
            level=0, subtask=subtask, executor=f"executor-{subtask}", begin_ms=1.5,
            process_ms=1234.5, snapshot_ms=3.0, restored=subtask == 1,
        )
        for subtask in (1, 0)
    ]  # fmt: skip
    timings = msgspec.structs.replace(epoch.timings, subtasks=subtasks)
    log.append(lambda n: msgspec.structs.replace(epoch, number=n, parent=7, timings=timings))


def test_show_has_the_times_of_each_subtask_where_they_were_measured(store: Store) -> None:
    assert json_of("show", store.url)["subtasks"] == []
    with_times(store)
    assert len(json_of("show", store.url)["subtasks"]) == 2
    text = call("show", store.url).stdout
    assert "1,234.5" in text and "executor-1" in text
    first, second = [line for line in text.splitlines() if "executor-" in line]
    assert "yes" not in first and "yes" in second


def test_show_tells_how_far_time_has_come_and_what_was_put_aside(store: Store) -> None:
    text = call("show", store.url).stdout
    assert "put aside" not in text and "failed" not in text
    log = Log(store)
    epoch = log.epoch(7)
    counted = measured(rows_in=9, late_rows=3, untimed_rows=1, error_rows=2)
    log.append(
        lambda n: msgspec.structs.replace(
            epoch, number=n, parent=7, watermark_ms=61_000, passed_ms=60_000,
            watermarks={"a": 61_000, "b": None}, timers={"op": (70_000, None)},
            metrics=Measured(operators={"op": counted}),
        )
    )  # fmt: skip
    facts = json_of("show", store.url)
    assert (facts["watermark_ms"], facts["passed_ms"]) == (61_000, 60_000)
    assert facts["timers"] == {"op": [70_000, None]}
    text = call("show", store.url).stdout
    for said in ("watermark", "b: none yet", "3 late, 1 without a time", "2 rows put aside"):
        assert said in text


def with_rocksdb_base(store: Store) -> None:
    """An epoch one of whose files is a base of many objects."""
    log = Log(store)
    epoch = log.epoch(log.newest_number() or 0)
    uid, entry = next(iter(epoch.operators.items()))
    part = next(part for part in entry.ranges if part.files)
    base = msgspec.structs.replace(
        part.files[0],
        kind="base",
        format="rocksdb",
        path=f"state/000000000001/{'ab' * 16}.rocks",
        offset=0,
        rows=12_345_678,
        objects=[f"state/000000000001/{i:032x}.sst" for i in range(12)],
        objects_bytes=987_654_321,
    )
    ranges = [msgspec.structs.replace(p, files=[base]) if p is part else p for p in entry.ranges]
    operators = {**epoch.operators, uid: msgspec.structs.replace(entry, ranges=ranges)}
    log.append(
        lambda n: msgspec.structs.replace(epoch, number=n, parent=epoch.number, operators=operators)
    )


def test_show_fits_into_80_columns(store: Store) -> None:
    with_times(store)
    with_rocksdb_base(store)
    assert "1/abababab.rocks + 12 more" in call("show", store.url).stdout
    width = 0
    for line in call("show", store.url).stdout.splitlines():
        if not line.startswith(("j  file://", "  *")):
            width = max(width, len(line.rstrip()))
    assert width <= 80


def test_these_commands_do_not_import_pyspark(store: Store, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from cairn.cli import main\n"
        "url, new = sys.argv[1:]\n"
        "for line in (['branch', url, new], ['rollback', url, '4', '--yes'], ['show', new],\n"
        "             ['rm', new, '--yes']):\n"
        "    try: main(line)\n"
        "    except SystemExit as end: assert not end.code, line\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('pyspark', 'pandas')]\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, store.url, str(tmp_path / "b")],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
