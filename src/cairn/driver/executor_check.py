"""Check the executors before the takeover: their cairn, their Python, the checkpoint they see.

One small Spark job, with a task for each core: Spark gives the first round of tasks to all
executors that have a free core. Executors that come later are checked by their slots
(`slot/checkpoint`), which store nothing where the checkpoint is not the driver's.

Always true here:
- nothing is written on an executor;
- the function runs also where cairn is missing or of another version: it is sent by value, and
  imports cairn inside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cairn.errors import PlanError
from cairn.version import VERSION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OTHER_PYTHON: Final = "PYTHON_VERSION_MISMATCH"


class Found(NamedTuple):
    """The findings of one task, on one host."""

    host: str
    cairn: str
    """The version, or why cairn cannot be imported."""
    python: str
    probe: str
    """The content of the probe, or why it cannot be read."""


def check_executors(spark: SparkSession, url: str, path: str, name: str) -> None:
    """Refuse executors that could not run the job; the probe at `path` of the store holds `name`.

    PlanError, in one sentence per host.
    """
    context = spark.sparkContext
    context.setJobDescription("cairn: check of the executors")
    tasks = max(1, context.defaultParallelism)
    try:
        look = make_look(url, path, VERSION)
        rows = context.parallelize(range(tasks), tasks).mapPartitions(look).collect()
    except Exception as error:
        if _OTHER_PYTHON in str(error):
            line = next(row for row in str(error).splitlines() if _OTHER_PYTHON in row)
            raise PlanError(
                "driver and executors run different versions of Python\n"
                f"  expected: {this_python()} on all of them\n  found: {line.strip()}\n"
                "  next: set PYSPARK_PYTHON to the same Python on every host",
            ) from None
        raise
    finally:
        context.setJobDescription(None)
    refuse((Found(*row) for row in rows), url, name)


def this_python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def make_look(url: str, path: str, version: str) -> Callable[[Iterable[Any]], list[Any]]:
    """Return the function of a task. Functions inside functions are pickled by value."""

    def look(rows: Iterable[Any]) -> list[Any]:
        import importlib
        import os
        import sys

        found = probe = ""
        try:
            found = importlib.import_module("cairn").__version__
            if found == version:
                from cairn.storage.store import NotFoundError, open_store

                try:
                    probe = open_store(url, create=False).get(path).decode()
                except NotFoundError:
                    probe = "the folder or the file is not there"
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            found, probe = (found, text) if found else (f"none ({text})", "")
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return [(os.uname().nodename, found, python, probe)]

    return look


def refuse(found: Iterable[Found], url: str, name: str) -> None:
    """Raise a PlanError if an executor differs from the driver; name the hosts."""
    by_host = {each.host: each for each in found}
    versions = f"cairn {VERSION} and Python {this_python()}"
    others = [
        f"cairn {each.cairn} and Python {each.python} on {each.host}"
        for each in by_host.values()
        if (each.cairn, each.python) != (VERSION, this_python())
    ]
    if others:
        raise PlanError(
            f"driver and executors differ: the driver runs {versions}, "
            f"the executors run {_join(others)}\n"
            "  next: install the driver's versions on every host, or ship them with "
            "--archives or the container image",
            found=others,
        )
    blind = [each for each in by_host.values() if each.probe != name]
    if blind:
        raise PlanError(
            f"checkpoint {url} is not the driver's on {_join([each.host for each in blind])}\n"
            "  expected: what the driver has just written there\n"
            f"  found: {blind[0].probe}\n"
            "  next: pass a checkpoint that driver and executors share: a bucket, or a folder that "
            "is mounted at this path on all of them",
            url=url,
            hosts=[each.host for each in blind],
        )


def _join(names: Sequence[str]) -> str:
    return ", ".join(sorted(names))
