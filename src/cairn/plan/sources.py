"""Facts about a source, from its DataFrame: its format, its limit per epoch, what it throws away.

Always true here:
- what cannot be told is taken for harmless, and the user can say it: `job.source(replayable=)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cloudpickle

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
    python: type | None = None
    """The class of a data source in Python."""

    @property
    def limits(self) -> dict[str, str]:
        """The options that limit a batch of this source."""
        return {name: value for name, value in self.options.items() if name.lower() in LIMITS}

    @property
    def discards(self) -> str | None:
        """The reason why rows cannot be read again once Spark is done with them; else empty."""
        options = {name.lower(): value.lower() for name, value in self.options.items()}
        if self.format.lower() in ("socket", "textsocket"):
            return "a socket cannot be read again"
        if options.get("cleansource", "off") != "off":
            return f"cleanSource={options['cleansource']} removes files that were read"
        if self.python is not None and _has_own_commit(self.python, self.options):
            return f"the reader of {self.format!r} may throw away what is given to its commit()"
        return None


def limits(dataframe: DataFrame | None) -> dict[str, str] | None:
    """Return the options that limit a batch of a source; None if they are unknown."""
    if dataframe is None:
        return None
    found = readings(dataframe)
    return {name: value for each in found for name, value in each.limits.items()}


def readings(dataframe: DataFrame) -> list[Reading]:
    """The sources of Spark's that a streaming DataFrame is made from."""
    session = dataframe.sparkSession._jsparkSession
    return list(_readings(session, dataframe._jdf.queryExecution().analyzed().collectLeaves()))


def _readings(session: Any, leaves: Any) -> Iterator[Reading]:
    for at in range(leaves.size()):
        leaf = leaves.apply(at)
        kind = leaf.getClass().getSimpleName()
        if kind == "StreamingRelation":
            source = leaf.dataSource()
            yield Reading(source.className(), _options(source.options().iterator()))
        elif kind == "StreamingRelationV2":
            entries = leaf.extraOptions().asCaseSensitiveMap()
            options = {str(name): str(value) for name, value in dict(entries).items()}
            is_python = "PythonTable" in leaf.table().getClass().getSimpleName()
            python = _python_class(session, leaf.sourceName()) if is_python else None
            yield Reading(leaf.sourceName(), options, python)


def _python_class(session: Any, name: str) -> type | None:
    """A data source in Python, as it was registered."""
    try:
        found = session.sessionState().dataSourceManager().lookupDataSource(name)
        pickled = found.dataSourceCls().command().mkString(",")
        source: type = cloudpickle.loads(bytes(int(byte) & 255 for byte in pickled.split(",")))
        return source
    except Exception:
        return None  # Built in, or of a Spark that keeps it elsewhere.


def _has_own_commit(source: Any, options: dict[str, str]) -> bool:
    """True if its reader, made as Spark makes it, acts when Spark is done with rows."""
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceStreamReader,
        SimpleDataSourceStreamReader,
    )
    from pyspark.sql.types import StructType

    try:
        made = source(options)
        schema = made.schema()
        if isinstance(schema, str):
            schema = StructType.fromDDL(schema)
        is_simple = type(made).streamReader is DataSource.streamReader
        reader = made.simpleStreamReader(schema) if is_simple else made.streamReader(schema)
    except Exception:
        return False  # Spark cannot make it either, and reports why.
    plain = {DataSourceStreamReader.commit, SimpleDataSourceStreamReader.commit}
    return type(reader).commit not in plain


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
