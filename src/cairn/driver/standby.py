"""A standby: a program whose Spark driver and slots are there, and that leads nothing yet.

`start` takes `prepared` over when the lead is granted, and the engine gets `driver`: slots that
hold state by version are used again, and no process is started at the takeover.

Always true here:
- nobody is fenced, no sink is opened, no record is written;
- the check against the newest epoch is the one of a start, as far as it needs no sink.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from cairn.driver.options import Options
from cairn.driver.start import check_prepared, prepare
from cairn.errors import CairnError
from cairn.plan.graph import Graph

if TYPE_CHECKING:
    from cairn.driver.spark_driver import SparkDriver


class Standby:
    """One program that waits for the lead."""

    def __init__(self, graph: Graph, options: Options) -> None:
        from cairn.driver.spark_driver import SparkDriver

        self._graph = graph
        self._options = options
        self.prepared = prepare(graph, options)
        self.driver: SparkDriver = SparkDriver(
            graph,
            self.prepared.spec,
            graph.sources[0].dataframe.sparkSession,
            parallelism=self.prepared.parallelism,
            run_id=self.prepared.run_id,
        )

    def start_slots(self) -> None:
        """Start the slots in the background, with their executors and the nursery."""
        self.driver.start_slots(range(self.prepared.parallelism))

    def refusal(self) -> str | None:
        """Return why this program could not continue the job now; None if it could.

        An error of the store is not a refusal: it may be over before the takeover.
        """
        try:
            check_prepared(self._graph, self._options, self.prepared)
        except CairnError as error:
            return str(error)
        except Exception:
            return None
        return None

    def close(self) -> None:
        """End the slots of a program that will not lead."""
        with suppress(Exception):
            self.driver.say_goodbye()
        self.prepared.spark_place.close()
