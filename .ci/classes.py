"""Put the classes that a job on Spark loads into an archive: a JVM that has it starts sooner.

    python .ci/classes.py FILE

Tests start many JVMs, and half of the work of such a short life is loading classes. The archive
is of this Java and this Spark; a JVM that is another one goes without.

Always true here:
- FILE is there as a whole, or not at all.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(target: Path) -> None:
    unfinished = target.with_suffix(".unfinished")
    os.environ["SPARK_SUBMIT_OPTS"] = (
        f"-XX:ArchiveClassesAtExit={unfinished} -Xlog:disable -Xlog:all=error:stderr"
    )
    sys.path.insert(0, str(ROOT))
    import cairn
    from tests.spark.programs.ledger import SCHEMA, build, payments
    from tests.spark.support import Input, finish

    spark = cairn.session("classes", master="local[2]", ui__enabled=False)
    jvm = spark.sparkContext._gateway.proc
    with tempfile.TemporaryDirectory() as work:
        source = Input(Path(work) / "in", SCHEMA).add_all(payments(2))
        finish(build(spark, source.folder, work), Path(work) / "checkpoint")
        spark.read.parquet(f"{work}/booked").groupBy("account").count().collect()
    spark.stop()
    # The end of its input is the end of the JVM, which then writes the archive.
    jvm.stdin.close()
    jvm.wait()
    unfinished.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
