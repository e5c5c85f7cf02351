"""A standby: a program whose Spark driver and slots are there, and that leads nothing yet.

`start` takes `prepared` over when the lead is granted, and the engine gets `driver`: slots that
hold state by version are used again, and no process is started at the takeover.

Always true here:
- nobody is fenced, no sink is opened, nothing is written into the checkpoint;
- the check against the newest epoch is the one of a start, as far as it needs no sink.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from cairn.driver.following import Follower
from cairn.driver.options import Options
from cairn.driver.start import check_prepared, make_coordinator, prepare
from cairn.errors import CairnError
from cairn.logs import logger
from cairn.plan.graph import Graph
from cairn.protocol.messages import Begin
from cairn.storage.manifest import Epoch

if TYPE_CHECKING:
    from cairn.driver.spark_driver import SparkDriver

FOLLOW_AFTER_S = 0.5
CLOSE_PATIENCE_S = 10.0


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
        self._following: threading.Thread | None = None
        self._coordinator = make_coordinator(graph, options, self.prepared)
        self._follower = Follower(
            self._coordinator, self._send, self._check, is_hot=options.standby == "hot"
        )
        self._granted = threading.Event()
        self._is_rehearsed = False

    @property
    def epoch(self) -> int | None:
        """The newest epoch that the slots hold; None if they hold none."""
        return self._follower.epoch

    def begin(self, granted: threading.Event) -> None:
        """Start the slots in the background, and follow the job until the lead is granted."""
        self._granted = granted
        self.driver.start_slots(range(self.prepared.parallelism))
        self._following = threading.Thread(
            target=self._follow, args=(granted,), daemon=True, name="cairn-follower"
        )
        self._following.start()

    def _follow(self, granted: threading.Event) -> None:
        # A driver that leads at once has nothing to follow.
        if not granted.wait(FOLLOW_AFTER_S):
            self._follower.run(granted)

    def _send(self, message: Begin, is_needed: Callable[[], bool]) -> None:
        """Send the slots a message, and rehearse an epoch with the first one that they got."""
        self.driver.follow(message, is_needed)
        if not self._is_rehearsed and is_needed():
            self._is_rehearsed = True
            try:
                self.driver.rehearse(message, self._granted)
                logger.debug("standby: an epoch is rehearsed")
            except Exception as error:
                # The takeover works without it, and takes a little longer.
                logger.debug("standby: no rehearsal: %s", error)

    def refusal(self) -> str | None:
        """Return why this program could not continue the job now; None if it could.

        An error of the store is not a refusal: it may be over before the takeover.
        """
        try:
            newest = self._coordinator.log.newest_epoch()
            if newest is not None:
                self._check(newest)
        except CairnError as error:
            return str(error)
        except Exception:
            return None
        return None

    def _check(self, epoch: Epoch) -> None:
        check_prepared(epoch, self._graph, self._options, self._coordinator)

    def close(self) -> None:
        """End the slots of a program that will not lead. It follows no more."""
        if self._following is not None:
            # A message on its way would start slots again.
            self._following.join(CLOSE_PATIENCE_S)
        with suppress(Exception):
            self.driver.say_goodbye()
        self.prepared.spark_place.close()
