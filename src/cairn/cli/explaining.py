"""Explain the graph of a job in a file, without running it.

Always true here:
- only the explanation goes to stdout: output of the file itself goes to stderr.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from cairn.cli.job_file import UsageError, build_job, load_build, parse_conf


def explain_job(
    target: str,
    args: Sequence[str],
    *,
    svg: str | None,
    as_json: bool,
    master: str | None,
    conf: Sequence[str],
) -> None:
    """Print the graph, or draw it into the file `svg`."""
    from cairn.session import session

    settings = parse_conf(conf, master)
    drawing = None if svg is None else Path(svg).expanduser()
    if drawing is not None and not drawing.absolute().parent.is_dir():
        raise UsageError(f"the folder of {svg!r} does not exist\n  next: make it first")
    _, build = load_build(target, args)
    spark = session(Path(target.rpartition(":")[0]).stem, **{"ui__enabled": False, **settings})
    try:
        with contextlib.redirect_stdout(sys.stderr):
            job = build_job(build, spark, target, args)
        if drawing is not None:
            drawing.write_text(job.explain("svg"))
        if as_json:
            print(job.explain("json"))
        elif drawing is None:
            job.explain()
    finally:
        with contextlib.suppress(Exception):
            spark.stop()
