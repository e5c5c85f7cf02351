"""A job: sources, streams, and how to start it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from cairn.errors import PlanError
from cairn.plan.check import check_event_time, check_name, check_uid
from cairn.plan.graph import Graph, Node, Port, SourceNode, build_graph
from cairn.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cairn.run import Run


class Job:
    """A named graph of operators. `max_parallelism` is fixed for the life of its state."""

    def __init__(self, name: str, *, max_parallelism: int = 128) -> None:
        check_name("job", name)
        self.name = name
        self.max_parallelism = max_parallelism
        self._nodes: dict[str, Node] = {}

    def source(
        self,
        name: str,
        dataframe: DataFrame,
        *,
        event_time: str | None = None,
    ) -> Stream:
        """A streaming DataFrame. With `event_time`, rows of a key are processed in that order."""
        from cairn.plan.dataframe import dataframe_schema

        check_uid(name, self._nodes)
        if not getattr(dataframe, "isStreaming", False):
            raise PlanError(
                f"source {name!r} is no streaming DataFrame\n  next: read it with spark.readStream"
            )
        for other in self._sources():
            if other.dataframe.sparkSession is not dataframe.sparkSession:
                raise PlanError(f"sources {other.name!r} and {name!r} are of two Spark sessions")
        schema = dataframe_schema(dataframe)
        check_event_time(event_time, schema, name)
        self._nodes[name] = SourceNode(name, dataframe, schema, event_time, None)
        return Stream(self, (Port(name),), schema)

    def graph(self) -> Graph:
        """The job as it stands, checked and cut into levels."""
        return build_graph(self.name, self.max_parallelism, dict(self._nodes))

    def start(
        self,
        *,
        checkpoint: str,
        parallelism: int | None = None,
        backend: str = "heap",
        trigger: str = "1 second",
        retained_epochs: int = 10,
        allow_dropped_state: bool = False,
        reset_sources: Collection[str] = (),
    ) -> Run:
        """Run the job, from its newest epoch if the checkpoint has one.

        `trigger` is an interval between epochs, or "available-now" to process what is there
        and end. Sources in `reset_sources` are read from their beginning at every such
        start; the state keeps what it holds of them.
        """
        from cairn.run import Run

        return Run(
            self.graph(),
            checkpoint=str(checkpoint),
            parallelism=parallelism,
            backend=backend,
            trigger=trigger,
            retained_epochs=retained_epochs,
            allow_dropped_state=allow_dropped_state,
            reset_sources=reset_sources,
        )

    def _sources(self) -> list[SourceNode]:
        return [node for node in self._nodes.values() if isinstance(node, SourceNode)]

    def _spark(self) -> SparkSession:
        session: Any = self._sources()[0].dataframe.sparkSession
        return session  # type: ignore[no-any-return]
