"""Two jobs with loops, and the driver program that runs one of them until it is killed.

    python -m tests.spark.programs.loops components|ranks <input> <work> [--rounds N]

Components: labels spread over a stream of edges. Ranks: what PageRank comes to, by pushing
what has changed of a page's rank to the pages it links to until that is next to nothing.
Reports {"end": status, "error": …} on its output.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import cairn
from cairn import Job, KeyedProcess, sinks, state
from tests.spark.support import Input

EDGES = "a bigint, b bigint"
SHARES = "page bigint, share double"
PAGES = 40
DAMPING = 0.5
ENOUGH = 1e-3
"""What is left of a change is not passed on below this."""


class Spread(KeyedProcess[Any]):
    """Keeps the least label that came by, and tells the neighbours of it."""

    label = state.Value("bigint")
    peers = state.Map("bigint", "boolean")

    def process(self, row: Any, ctx: Any) -> Any:
        label = self.label.get()
        if label is None:
            label = row.node
            self.label.set(label)
            ctx.output("labels", (row.node, label))
        if row.peer is not None:
            self.peers[row.peer] = True
            yield row.peer, None, label
        elif row.label < label:
            self.label.set(row.label)
            ctx.output("labels", (row.node, row.label))
            for peer in self.peers:
                yield peer, None, row.label


def components(spark: Any, input_folder: Any, work: Any, rounds: int = 1) -> Job:
    job = Job("components", max_parallelism=16)
    edges = job.source("edges", Input(Path(input_folder), EDGES).stream(spark))
    both = edges.transform(
        lambda df: df.selectExpr("a AS node", "b AS peer", "cast(null AS bigint) AS label").union(
            df.selectExpr("b AS node", "a AS peer", "cast(null AS bigint) AS label")
        )
    )

    def body(loop: Any) -> Any:
        told = loop.key_by("node").process(
            Spread(), schema="node bigint, peer bigint, label bigint", uid="spread"
        )
        return told, told.side("labels", "node bigint, label bigint")

    labels = both.iterate(body, uid="loop", max_rounds_per_epoch=rounds)
    labels.sink_to(sinks.Files(str(Path(work) / "labels")), uid="labels")
    return job


def union_find(edges: Any) -> dict[int, int]:
    """Of each node the least one it is connected with."""
    parent: dict[int, int] = {}

    def find(node: int) -> int:
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    for a, b in edges:
        left, right = find(a), find(b)
        parent[max(left, right)] = min(left, right)
    return {node: find(node) for node in parent}


class Gather(KeyedProcess[Any]):
    """A page: what has come to it counts, and the damped rest is to go on to its links."""

    rank = state.Value("double", default=0.0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.rank.set(self.rank.get() + row.share)
        ctx.output("ranks", (row.page, self.rank.get()))
        if abs(row.share) > ENOUGH:
            return row.page, row.share * DAMPING
        return None


def ranks(spark: Any, input_folder: Any, work: Any, rounds: int = 1) -> Job:
    """On links that are known: page n links to 2n + 1 and 3n + 1, modulo PAGES."""
    job = Job("ranks", max_parallelism=16)
    seeds = job.source(
        "seeds", Input(Path(input_folder), "page bigint, share double").stream(spark)
    )

    def body(loop: Any) -> Any:
        # The shares of an epoch that come to a page count as one.
        pages = (
            loop.transform(lambda df: df.groupBy("page").sum("share").toDF("page", "share"))
            .key_by("page")
            .process(Gather(), schema="page bigint, share double", uid="gather")
        )
        shares = pages.transform(
            lambda df: df.selectExpr(
                f"explode(array((2 * page + 1) % {PAGES}, (3 * page + 1) % {PAGES})) AS page",
                "share / 2 AS share",
            )
        )
        return shares, pages.side("ranks", "page bigint, rank double")

    out = seeds.iterate(body, uid="pages", max_rounds_per_epoch=rounds)
    out.sink_to(sinks.Files(str(Path(work) / "ranks")), uid="ranks")
    return job


def batch_ranks(seeds: list[tuple[int, float]]) -> list[float]:
    """The fixed point that the job comes near, by iteration over all pages."""
    given = [0.0] * PAGES
    for page, share in seeds:
        given[page] += share
    found = list(given)
    for _ in range(200):
        after = list(given)
        for page, rank in enumerate(found):
            for link in ((2 * page + 1) % PAGES, (3 * page + 1) % PAGES):
                after[link] += DAMPING * rank / 2
        found = after
    return found


JOBS = {"components": components, "ranks": ranks}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("input")
    parser.add_argument("work")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    spark = cairn.session("loops", master="local[2]", ui__enabled=False)
    job = JOBS[given.job](spark, given.input, given.work, given.rounds)
    run = job.start(
        checkpoint=str(Path(given.work) / "checkpoint"), parallelism=2, trigger="available-now"
    )
    error = None
    try:
        run.wait(120)
    except Exception as failure:
        error = str(failure)
    print(json.dumps({"end": run.status, "error": error}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
