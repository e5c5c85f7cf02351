"""A Java that lacks the module Spark asks for can still be used."""

from __future__ import annotations

import subprocess
from pathlib import Path

from cairn.java import MODULE, java_home_for_spark


def fake_java(home: Path, modules: str) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "release").write_text(f'JAVA_VERSION="25"\nMODULES="{modules}"\n')
    java = home / "bin" / "java"
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    java.chmod(0o700)
    return home


def test_a_java_with_the_module_is_used_as_it_is(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "java 25", f"java.base {MODULE}")
    assert java_home_for_spark(home, tmp_path / "run") == home
    assert not (tmp_path / "run").exists()


def test_without_the_module_a_wrapper_leaves_out_that_argument_alone(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "java 25", "java.base")
    found = java_home_for_spark(home, tmp_path / "run")
    assert java_home_for_spark(home, tmp_path / "run") == found
    call = [str(found / "bin/java"), "-Da=b c", f"--add-modules={MODULE}", "", "--add-modules=x"]
    said = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    assert said == "-Da=b c\n\n--add-modules=x\n"
    assert [file.name for file in (found / "bin").iterdir()] == ["java"]
