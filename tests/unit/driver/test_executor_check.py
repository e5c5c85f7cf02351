"""Executors that could not run the job are refused before the takeover, in one sentence."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import cloudpickle

import cairn
from cairn.driver.executor_check import Found, make_look, refuse, this_python
from cairn.errors import PlanError
from cairn.storage.store import open_store

GOOD = Found("w1", cairn.__version__, this_python(), "abc")


def test_executors_like_the_driver_are_not_refused() -> None:
    refuse([GOOD, GOOD._replace(host="w2")], "s3://bucket/job", "abc")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"cairn": "0.0.9"}, "cairn 0.0.9 and"),
        ({"cairn": "none (ModuleNotFoundError: …)"}, "cairn none (ModuleNotFoundError: …) and"),
        ({"python": "3.9"}, "Python 3.9 on"),
    ],
)
def test_executors_with_other_versions_are_refused_in_one_sentence(
    changed: dict[str, str], named: str
) -> None:
    other = GOOD._replace(host="w2", **changed)
    with pytest.raises(PlanError) as refused:
        refuse([GOOD, other], "s3://bucket/job", "abc")
    sentence = str(refused.value).splitlines()[0]
    assert named in sentence and "w2" in sentence and "w1" not in sentence
    assert f"the driver runs cairn {cairn.__version__} and Python {this_python()}" in sentence


def test_a_host_without_the_mount_is_named() -> None:
    blind = GOOD._replace(host="w2", probe="the folder or the file is not there")
    with pytest.raises(PlanError, match="/data/job is not the driver's on w2") as refused:
        refuse([GOOD, blind], "file:///data/job", "abc")
    assert "found: the folder or the file is not there" in str(refused.value)


def test_a_task_reads_the_probe_back_and_needs_no_cairn_to_be_unpickled(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "checkpoint"))
    store.put("probe-abc", b"abc")
    sent = cloudpickle.dumps(make_look(store.url, "probe-abc", cairn.__version__))
    [(_, *found)] = pickle.loads(sent)([])
    assert found == [cairn.__version__, this_python(), "abc"]
    (tmp_path / "sent").write_bytes(sent)
    program = (
        "import pickle, sys; sys.modules['cairn'] = None\n"
        "print(pickle.load(open(sys.argv[1], 'rb'))([])[0][1])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "sent")]
    without = subprocess.run(command, check=True, capture_output=True, text=True)
    assert without.stdout.startswith("none (ModuleNotFoundError")


def test_a_task_makes_no_folder_where_there_is_none(tmp_path: Path) -> None:
    look = make_look(f"file://{tmp_path}/missing", "probe-abc", cairn.__version__)
    [(_, _, _, probe)] = look([])
    assert probe == "the folder or the file is not there"
    assert not (tmp_path / "missing").exists()


def test_a_task_with_another_cairn_does_not_touch_the_checkpoint(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("probe-abc", b"abc")
    [(_, _, _, probe)] = make_look(store.url, "probe-abc", "0.0.9")([])
    assert probe == ""
