"""Changes of a running job: another parallelism, other ranges, other functions.

    ask      check the change and prepare it beside the epochs, or refuse it
    apply    between two epochs, apply all changes since the last time

Always true here:
- an epoch runs with all of a change or none of it;
- of two requests for the same thing before an epoch begins, the last one counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import cloudpickle
import msgspec

from cairn.crash import crash_point
from cairn.driver.coordinator.epoch import Coordinator, clock_ms
from cairn.driver.coordinator.resume import check_resume
from cairn.driver.coordinator.ticker import Pace
from cairn.driver.options import check_parallelism
from cairn.errors import PlanError
from cairn.functions import Function, hooks_of
from cairn.logs import logger
from cairn.plan.check import (
    check_function,
    check_handlers,
    check_same_broadcast,
    check_ttl,
)
from cairn.plan.deploy import pickle_function
from cairn.plan.graph import Graph, ProcessNode
from cairn.protocol.scoped_state import states_by_scope
from cairn.report.balance import Balance
from cairn.report.scaling import Decision

if TYPE_CHECKING:
    from cairn.driver.spark_driver import SparkDriver


@dataclass
class _Change:
    """The changes that the next epoch will run with."""

    parallelism: int | None = None
    is_rebalance: bool = False
    decision: Decision | None = None
    preparations: list[threading.Thread] = field(default_factory=list)
    functions: dict[str, bytes] = field(default_factory=dict)
    allow_dropped_state: bool = False


class Changes:
    """Requested changes that have not taken effect yet."""

    def __init__(
        self,
        graph: Graph,
        coordinator: Coordinator,
        driver: SparkDriver,
        pace: Pace,
        *,
        url: str,
    ) -> None:
        """`url` of the checkpoint is for error messages."""
        self._graph = graph
        self._coordinator = coordinator
        self._driver = driver
        self._pace = pace
        self._url = url
        self._lock = threading.Lock()
        self._change: _Change | None = None

    @property
    def is_asked(self) -> bool:
        return self._change is not None

    def rescale(self, parallelism: int, decision: Decision | None = None) -> None:
        """Run the next epoch with this many subtasks; by this decision, or on request."""
        check_parallelism(parallelism, self._graph.group_count)
        preparation = threading.Thread(
            target=self._prepare, args=(parallelism,), daemon=True, name="cairn-rescale"
        )

        def ask(change: _Change) -> None:
            change.parallelism, change.decision = parallelism, decision
            change.preparations.append(preparation)
            preparation.start()

        self._ask(ask)

    def rebalance(self) -> Balance:
        """Cut the ranges of the next epoch by load, and return what that changes by now."""

        def ask(change: _Change) -> None:
            change.is_rebalance = True

        self._ask(ask)
        return self._coordinator.subtasks.compare_ranges()

    def _prepare(self, parallelism: int) -> None:
        """Start slots ahead of the next epoch; if that fails, the epoch starts them."""
        try:
            self._driver.prepare(parallelism, self._coordinator.subtasks.slots_for(parallelism))
        except Exception:
            job = {"job": self._graph.name}
            logger.warning("a rescale could not be prepared", exc_info=True, extra=job)

    def upgrade(self, uid: str, function: Function, *, allow_dropped_state: bool) -> None:
        """Run the next epoch with this function in place of the operator's."""
        if uid not in self._coordinator.operators:
            known = ", ".join(self._coordinator.operators)
            raise PlanError(
                f"the job has no operator {uid!r}\n  found: {known}\n"
                "  next: give the uid of one of these",
                uid=uid,
            )
        spec = self._coordinator.operators[uid]
        check_function(function, uid)
        inputs = [inlet.name for inlet in spec.row_inlets if inlet.name]
        has_broadcast = spec.broadcast_inlet is not None
        check_handlers(function, uid, inputs, has_broadcast=has_broadcast)
        self._check_same_time(uid, function)
        check_same_broadcast(function, uid, spec.broadcast)
        check_ttl(function, uid, has_event_time=spec.event_time is not None)
        pickled = pickle_function(uid, function)
        self._check_state(uid, pickled, allow_dropped_state)

        def ask(change: _Change) -> None:
            change.functions[uid] = pickled
            change.allow_dropped_state |= allow_dropped_state

        self._ask(ask)

    def _ask(self, ask: Callable[[_Change], None]) -> None:
        with self._lock:
            self._change = self._change or _Change()
            self._pace.ask()
            ask(self._change)

    def apply(self) -> None:
        """Apply all requested changes."""
        with self._lock:
            change, self._change = self._change, None
        if change is None:
            return
        # Changes take effect between two epochs.
        self._coordinator.commit_epoch()
        for preparation in change.preparations:
            preparation.join()
        coordinator = self._coordinator
        spec = coordinator.spec
        for uid, function in change.functions.items():
            spec = spec.with_function(uid, function)
        rewrite = frozenset().union(
            *(
                self._check_state(uid, function, change.allow_dropped_state)
                for uid, function in change.functions.items()
            )
        )
        if change.parallelism is not None and change.parallelism != coordinator.parallelism:
            coordinator.decision = change.decision or _make_request(
                coordinator.parallelism, change.parallelism
            )
            coordinator.subtasks.rescale(change.parallelism)  # It cuts the ranges by load too.
        elif change.is_rebalance:
            self._log_balance(coordinator.subtasks.rebalance())
        coordinator.deploy(spec, rewrite=rewrite)
        self._driver.deploy(spec, coordinator.parallelism, coordinator.subtasks.starts)
        self._log(change)
        crash_point("driver.deployed")

    def _log(self, change: _Change) -> None:
        job, parallelism = self._graph.name, change.parallelism
        if parallelism is not None:
            facts = {"job": job, "parallelism": parallelism}
            logger.info("rescaled: the job runs with %d subtasks now", parallelism, extra=facts)
        for uid in change.functions:
            facts = {"job": job, "operator": uid}
            logger.info("upgraded: operator %r has another function", uid, extra=facts)

    def _log_balance(self, balance: Balance) -> None:
        facts = {"job": self._graph.name, "groups_moved": balance.groups_moved}
        logger.info("rebalanced: %s", balance.text(), extra=facts)

    def join(self, timeout_s: float) -> None:
        """Wait for preparations: the order to end does not reach a slot that is starting."""
        for preparation in self._change.preparations if self._change else ():
            preparation.join(timeout_s)

    def _check_state(self, uid: str, function: bytes, allow_dropped_state: bool) -> frozenset[str]:
        newest = self._coordinator.newest
        if newest is None:
            return frozenset()
        operator = self._coordinator.operators[uid]
        states = {
            state.uid: state for state in states_by_scope(operator, cloudpickle.loads(function))
        }
        held = {each: newest.operators[each] for each in states if each in newest.operators}
        return check_resume(
            msgspec.structs.replace(newest, operators=held),
            states,
            job_name=self._graph.name,
            url=self._url,
            allow_dropped_state=allow_dropped_state,
        )

    def _check_same_time(self, uid: str, function: Function) -> None:
        """Refuse a function that would need another plan, which a running job cannot change."""
        node = self._graph.nodes[uid]
        assert isinstance(node, ProcessNode)
        for name in ("wants_order", "result_time", "result_shift_us", "result_keys"):
            found, planned = (getattr(hooks_of(each), name) for each in (function, node.function))
            if found != planned:
                raise PlanError(
                    f"operator {uid!r}: its function has {name} = {planned!r}, the new one "
                    f"{found!r}\n  next: stop the run and start the job with the new function",
                    uid=uid,
                )


def _make_request(before: int, after: int) -> Decision:
    return Decision(
        kind="up" if after > before else "down",
        parallelism=before,
        target=after,
        reason="it was requested",
        wall_ms=clock_ms(),
        by="request",
    )
