"""`job.py:build`: load a job from a file.

Always true here:
- a mistake in the command (no such file, no such function, too few arguments) is a UsageError
  before Spark starts;
- classes and functions of the file are pickled by value for slots and Python workers, which
  cannot import the file.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

from cairn.errors import CairnError, PlanError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cairn.job import Job

Build = Callable[..., Any]


class UsageError(CairnError):
    """The command line is wrong; nothing has been done."""


def load_build(target: str, args: Sequence[str]) -> tuple[ModuleType, Build]:
    """Return the module and its `build(spark, *args)`, which accepts these arguments."""
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise UsageError(
            f"{target!r} does not name a file and a function\n"
            "  expected: path/to/job.py:build\n"
            "  next: name the function that returns the job"
        )
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"the file {file!r} does not exist\n  full path: {path}")
    module = _load(path)
    build = getattr(module, name, None)
    if not callable(build):
        own = (n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_")
        found = [n for n in own if vars(module)[n].__module__ == module.__name__]
        raise UsageError(
            f"{file} has no function {name!r}\n  found: {', '.join(found) or 'no function at all'}"
        )
    _check_arguments(build, name, args)
    return module, build


def _load(path: Path) -> ModuleType:
    # As `python job.py` does: modules beside it can be imported. Slots get the same path.
    sys.path.insert(0, str(path.parent))
    # With a prefix, so that a job called queue.py does not replace the queue module.
    name = f"cairn_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file\n  next: give it a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    cloudpickle.register_pickle_by_value(module)
    spec.loader.exec_module(module)
    return module


def _check_arguments(build: Build, name: str, args: Sequence[str]) -> None:
    signature = inspect.signature(build)
    try:
        signature.bind(None, *args)
    except TypeError as error:
        raise UsageError(
            f"{name}({', '.join(signature.parameters)}) cannot be called: {error}\n"
            f"  given: {' '.join(args) or 'nothing'}\n"
            "  next: put the arguments after `--`; cairn passes the Spark session itself"
        ) from None


def build_job(build: Build, spark: SparkSession, target: str, args: Sequence[str]) -> Job:
    """Call the function, and check that it returns a job."""
    from cairn.job import Job

    job = build(spark, *args)
    if not isinstance(job, Job):
        raise PlanError(
            f"{target} returned {type(job).__name__}, expected a cairn.Job\n"
            "  next: end the function with `return job`"
        )
    return job


def parse_conf(pairs: Sequence[str], master: str | None) -> dict[str, str]:
    """Return the Spark settings of a command line."""
    conf = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--conf {pair!r} is not a setting\n  expected: NAME=VALUE")
        conf[key] = value
    if master is not None:
        conf["spark.master"] = master
    return conf


def pickle_by_value_in_spark(module: ModuleType) -> None:
    """Pickle Python UDFs of the file by value too: Spark has its own cloudpickle."""
    from pyspark import cloudpickle as spark_pickle

    spark_pickle.register_pickle_by_value(module)
