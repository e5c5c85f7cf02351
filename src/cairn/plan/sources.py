"""What a source's DataFrame tells of it: its format, its limit per epoch, what it throws away.

Always true here:
- what cannot be told is taken for harmless, and the user can say it: `job.source(replayable=)`;
- only what was asked of the reader is looked at: no source is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cairn.errors import PlanError
from cairn.plan.graph import Graph

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LIMITS: Final = frozenset(
    {
        "maxbytesperbatch", "maxbytespertrigger", "maxeventspertrigger", "maxfilespertrigger",
        "maxoffsetspertrigger", "maxrecordspertrigger", "maxrowspertrigger", "rowsperbatch",
        "rowspersecond",
    }
)  # fmt: skip
"""Options by which sources say how much they give at most, in lower case."""


class Reading(NamedTuple):
    """One source of Spark's, as it was asked for."""

    format: str
    options: dict[str, str]

    @property
    def limits(self) -> dict[str, str]:
        """How much an epoch gets of it at most, in its own words."""
        return {name: value for name, value in self.options.items() if name.lower() in LIMITS}

    @property
    def discards(self) -> str | None:
        """What it does with rows that Spark is done with, if it throws them away."""
        options = {name.lower(): value.lower() for name, value in self.options.items()}
        if self.format.lower() in ("socket", "textsocket"):
            return "a socket cannot be read again"
        if options.get("cleansource", "off") != "off":
            return f"cleanSource={options['cleansource']} removes files that were read"
        return None


def readings(dataframe: DataFrame) -> list[Reading]:
    """The sources of Spark's that a streaming DataFrame is made from."""
    return list(_readings(dataframe._jdf.queryExecution().logical().collectLeaves()))


def _readings(leaves: Any) -> Iterator[Reading]:
    for at in range(leaves.size()):
        leaf = leaves.apply(at)
        kind = leaf.getClass().getSimpleName()
        if kind == "StreamingRelation":
            source = leaf.dataSource()
            yield Reading(source.className(), _options(source.options().iterator()))
        elif kind == "StreamingRelationV2":
            entries = leaf.extraOptions().asCaseSensitiveMap()
            yield Reading(leaf.sourceName(), {str(k): str(v) for k, v in dict(entries).items()})


def _options(entries: Any) -> dict[str, str]:
    found = {}
    while entries.hasNext():
        entry = entries.next()
        found[str(entry._1())] = str(entry._2())
    return found


def check_replayable(graph: Graph) -> None:
    """Refuse sources that could not be read again from the last epoch."""
    for source in graph.sources:
        if source.replayable:
            continue
        if source.replayable is False:
            reason = "the job says that it cannot be read again"
        else:
            reason = next(filter(None, (r.discards for r in readings(source.dataframe))), "")
        if reason:
            raise PlanError(
                f"source {source.name!r} does not go with checkpoint_every: after a crash all "
                f"batches since the last epoch are read again, and {reason}\n"
                "  next: leave checkpoint_every=1, use guarantee='at-most-once', or say "
                "job.source(..., replayable=True) if it can",
                source=source.name,
            )
