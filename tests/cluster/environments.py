"""A Python environment with cairn and what it needs, made of the installed packages."""

from __future__ import annotations

import importlib.metadata as metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster.hosts import ROOT

_NAME = re.compile(r"[\w.-]+")


def make_environment(folder: Path) -> Path:
    """Make a virtual environment as `pip install cairn-state` would, but for pyspark.

    Spark's own hosts have pyspark, as a part of Spark.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    for name in sorted(_needed("cairn-state") - {"cairn-state", "pyspark", "py4j"}):
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            target = packages / str(file)
            # Scripts, beside the packages, name the Python that they were installed for.
            if ".." not in file.parts and source.is_file() and source.suffix != ".pyc":
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    shutil.copytree(
        ROOT / "src" / "cairn", packages / "cairn", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def _needed(name: str) -> set[str]:
    """Return the names of a distribution and of all that it needs."""
    found: set[str] = set()
    left = [name]
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            requires = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue  # For another system or Python.
        found.add(name)
        for line in requires:
            if "extra ==" not in line:
                match = _NAME.match(line)
                assert match is not None
                left.append(match[0].lower().replace("_", "-"))
    return found
