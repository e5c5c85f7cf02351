"""An archive of the JVM's classes: the first program leaves it behind, the second maps it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os
from pathlib import Path
import cairn
spark = cairn.session("archive", master="local[1]", ui__enabled=False)
jvm = spark.sparkContext._gateway.proc.pid
print(os.environ["XDG_CACHE_HOME"] in Path(f"/proc/{jvm}/maps").read_text())
print(spark.range(3).count())
"""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_first_program_leaves_an_archive_that_the_second_maps(tmp_path: Path) -> None:
    # Without the archive that tests share.
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("SPARK_SUBMIT_OPTS", None)

    def run() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment, capture_output=True, text=True, timeout=250,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert run() == ["False", "3"]
    folder = tmp_path / "cairn" / "classes"
    while not list(folder.glob("*.jsa")):
        failed = [path.read_text() for path in folder.glob("*.failed")]
        assert not failed
        time.sleep(0.2)
    assert run() == ["True", "3"]
    (archive,) = folder.glob("*.jsa")
    assert not list(folder.glob("*.unfinished"))

    # A damaged one is ignored, and the program runs as before.
    archive.unlink()
    archive.write_bytes(b"not an archive")
    assert run() == ["False", "3"]
