"""The files of `cairn new`: a job that runs, a test of its function, and next steps.

Always true here:
- an existing file is never overwritten;
- the project needs only the installed package: no input, no server.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from cairn.cli.job_file import UsageError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")

JOB: Final = '''"""Add up the payments of each account: the job {name!r}.

    python job.py                                          runs until Ctrl-C
    cairn run job.py:build --checkpoint checkpoint         the same, with a live view
"""

import cairn
from cairn import Job, KeyedProcess, sinks, state


class Spending(KeyedProcess):
    """Adds up what an account spends, and emits a row when it passes another 10,000."""

    payments = state.Value("long", default=0)
    spent = state.Value("long", default=0)

    def process(self, row, ctx):
        before = self.spent.get()
        self.payments.set(self.payments.get() + 1)
        self.spent.set(before + row.amount)
        if before // 10_000 < self.spent.get() // 10_000:
            yield row.account, self.payments.get(), self.spent.get()


def build(spark):
    """Return the job: a source, a function with state, a sink."""
    # Generated. Replace it with spark.readStream of files, Kafka, Delta, or another source.
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 200).load()
    payments = rows.selectExpr("value % 20 AS account", "pmod(hash(value), 1000) AS amount")
    job = Job("{name}")
    milestones = (
        job.source("payments", payments)
        .key_by("account")
        .process(Spending(), schema="account long, payments long, spent long", uid="spending")
    )
    milestones.sink_to(sinks.Console(rows_max=3), uid="console")
    return job


if __name__ == "__main__":
    with build(cairn.session("{name}")).start(checkpoint="checkpoint") as run:
        run.wait()
'''

TEST: Final = '''"""The function of the job, without Spark: `python test_job.py`, or with pytest."""

from cairn.testing import Harness

from job import Spending


def test_an_account_that_passes_ten_thousand_is_reported_once():
    rows = "account long, amount long"
    milestones = "account long, payments long, spent long"
    with Harness(Spending(), rows, "account", milestones) as harness:
        assert harness.push((7, 9_000)) == []
        assert harness.push((7, 2_000)) == [(7, 2, 11_000)]
        assert harness.push((7, 2_000)) == []


if __name__ == "__main__":
    test_an_account_that_passes_ten_thousand_is_reported_once()
    print("passed")
'''

README: Final = """# {name}

```bash
python job.py                  # runs until Ctrl-C; start it again and it continues
cairn ls checkpoint            # its epochs, newest first
cairn state checkpoint         # its states; `cairn state checkpoint spending spent` lists rows
python test_job.py             # tests the function, without Spark
```

`cairn run job.py:build --checkpoint checkpoint` runs the same job with a live view. Remove the
folder `checkpoint` to start from the beginning.
"""

FILES: Final = {"job.py": JOB, "test_job.py": TEST, "README.md": README}


def write_project(folder: str) -> list[Path]:
    """Write a project into a new or empty folder, and return its files."""
    path = Path(folder).expanduser()
    name = path.resolve().name
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a name for a job\n"
            "  expected: a letter, then letters, digits, - or _\n"
            "  next: cairn new payments"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{folder!r} already exists\n  next: choose another name")
    path.mkdir(parents=True, exist_ok=True)
    for file, text in FILES.items():
        # With "x" one of two writers at once fails.
        with (path / file).open("x") as out:
            out.write(text.format(name=name))
    return [path / file for file in FILES]
