"""The options of `job.start`, and their checks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cairn.driver.coordinator.autoscale import Autoscale
from cairn.driver.coordinator.guarantees import Guarantee, check_guarantee
from cairn.driver.coordinator.leadership.base import Warmth
from cairn.driver.serving import Serve
from cairn.driver.spark_config import check_session
from cairn.errors import PlanError
from cairn.functions import ERRORS, PartialProcess
from cairn.plan.graph import Graph, Port
from cairn.plan.sources import check_replayable
from cairn.protocol.letters import SCHEMA as LETTERS
from cairn.protocol.letters import OnError, check_on_error
from cairn.types import schema_ddl
from cairn.types.durations import Duration, duration_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OnStop = Literal["retain", "delete"]

BACKEND_MEMORY_MB_MIN = 16


@dataclass(frozen=True)
class Options:
    """The arguments of `job.start`; see there."""

    checkpoint: str
    parallelism: int | str | None = None
    autoscale: Autoscale = "off"
    backend: str = "heap"
    backend_memory_mb: int = 512
    slot_memory_mb: int | None = None
    trigger: str = "1 second"
    savepoint: str | None = None
    reset_sources: tuple[str, ...] = ()
    allow_dropped_state: bool = False
    allow_dropped_output: bool = False
    retained_epochs: int = 10
    retained_for: Duration | None = None
    on_stop: OnStop = "retain"
    spark_checkpoint: str | None = None
    drain: bool = False
    on_error: OnError = "fail"
    guarantee: Guarantee = "exactly-once"
    checkpoint_every: int = 1
    commit_timeout: Duration | None = None
    serve: Serve | None = None
    ha: str | None = None
    standby: Warmth = "warm"
    restart: str = "none"


def check_options(graph: Graph, options: Options, spark: SparkSession) -> int:
    """Refuse wrong options before anything is written; return the parallelism to start with."""
    from cairn.backends import BACKENDS, check_url, is_known
    from cairn.driver.spark_driver import trigger_ms

    check_session(spark)
    if not is_known(options.backend):
        # Not shown: it may hold a password.
        shown = repr(options.backend) if "://" not in options.backend else "of this URL"
        raise PlanError(
            f"no backend {shown}\n"
            f"  expected: {', '.join(BACKENDS)}, the URL of a database (postgresql://…), or "
            "env:NAME of a variable that has it"
        )
    check_url(options.backend)
    if options.backend_memory_mb < BACKEND_MEMORY_MB_MIN:
        raise PlanError(
            f"backend_memory_mb must be at least {BACKEND_MEMORY_MB_MIN}, "
            f"found {options.backend_memory_mb}"
        )
    if options.on_stop not in ("retain", "delete"):
        raise PlanError(f"on_stop must be 'retain' or 'delete', found {options.on_stop!r}")
    if options.standby not in ("warm", "hot"):
        raise PlanError(f"standby must be 'warm' or 'hot', found {options.standby!r}")
    if options.standby == "hot" and options.ha is None:
        raise PlanError(
            "standby='hot' is for a driver of a group, and this run has none\n"
            "  next: pass ha= as well, such as 'store:'"
        )
    if options.ha is not None:
        check_group(options)
    check_guarantee(options.guarantee, options.checkpoint_every)
    if options.commit_timeout is not None:
        duration_ms(options.commit_timeout, "commit_timeout")
    if options.checkpoint_every > 1 and options.guarantee != "at-most-once":
        check_replayable(graph)
    check_on_error(options.on_error)
    if options.on_error == "dead-letter":
        check_letters(graph)
    check_memory(options.checkpoint, spark.sparkContext.master)
    trigger_ms(spark, options.trigger)
    if options.drain and options.trigger != "available-now":
        raise PlanError(
            f"drain=True needs an input that ends, found trigger {options.trigger!r}\n"
            "  next: pass trigger='available-now' with it"
        )
    if options.retained_epochs < 1:
        raise PlanError(f"retained_epochs must be at least 1, found {options.retained_epochs}")
    if options.retained_for is not None:
        duration_ms(options.retained_for, "retained_for")
    names = [source.name for source in graph.sources]
    unknown = [name for name in options.reset_sources if name not in names]
    if unknown:
        raise PlanError(
            f"reset_sources names {unknown[0]!r}, which is not a source of the job\n"
            f"  found: {', '.join(names)}"
        )
    cores = int(spark.sparkContext.defaultParallelism)
    given = parallelism_range(options, graph.group_count)
    if given is None:
        return min(cores, graph.group_count)
    check_parallelism(given[-1], graph.group_count)
    if options.autoscale == "on":
        return given[0]  # More within a few epochs, if they are needed.
    return min(max(cores, given[0]), given[-1])


def check_group(options: Options) -> None:
    """Refuse what is for a run without standbys: each takeover is a start with these options."""
    if options.on_stop == "delete":
        raise PlanError(
            "on_stop='delete' is for a run without ha=: a driver that waits would go on with a "
            "checkpoint that is gone\n"
            "  next: leave on_stop= out; stop all drivers, then remove the checkpoint with cairn rm"
        )
    if options.reset_sources:
        raise PlanError(
            "reset_sources= is for a run without ha=: each driver that takes over would read "
            f"{', '.join(map(repr, options.reset_sources))} from the beginning again\n"
            "  next: start once with reset_sources= and without ha=, stop it after an epoch, then "
            "start the group"
        )


def parallelism_range(options: Options, group_count: int) -> range | None:
    """Return the numbers of subtasks that a job may have; None: it is not given."""
    given, mode = options.parallelism, options.autoscale
    if mode not in ("off", "observe", "on"):
        raise PlanError(f"autoscale must be 'off', 'observe' or 'on', found {mode!r}")
    if given is None:
        return None if mode == "off" else range(1, group_count + 1)
    first, dots, last = str(given).partition("..")
    try:
        smallest, largest = int(first), int(last if dots else first)
    except ValueError:
        smallest, largest = 1, 0
    if (dots and smallest > largest) or (not dots and not str(given).lstrip("-").isdigit()):
        raise PlanError(
            f"parallelism must be a number, or a range such as '2..16', found {given!r}",
        )
    if dots and mode == "off":
        raise PlanError(
            f"parallelism {given!r} is a range, and autoscale is 'off'\n"
            "  next: pass autoscale='on' or 'observe', or one number"
        )
    check_parallelism(smallest, group_count)
    if mode != "off" and not dots:
        raise PlanError(
            f"autoscale {mode!r} needs a range of parallelism, found {given!r}\n"
            "  next: pass a range such as '2..16', or autoscale='off'"
        )
    return range(smallest, largest + 1)


def check_memory(checkpoint: str, master: str) -> None:
    """Refuse a checkpoint in the memory of one machine for executors that may be on others."""
    if checkpoint.startswith("memory:") and not master.startswith("local"):
        raise PlanError(
            f"checkpoint {checkpoint!r} lies in the memory of the driver's machine, which "
            f"executors of {master!r} may not see\n"
            "  next: pass a place that driver and executors share: a bucket or a mounted folder"
        )


def check_parallelism(parallelism: int, group_count: int) -> None:
    if not 1 <= parallelism <= group_count:
        raise PlanError(
            f"parallelism must be between 1 and max_parallelism ({group_count}), "
            f"found {parallelism}"
        )


def check_letters(graph: Graph) -> None:
    """Refuse side outputs named like the dead letters; warn of letters that get lost."""
    consumed = [port for node in graph.operators for port in node.inputs]
    consumed += [port for node in graph.sinks for port in node.inputs]
    taken = {origin for port in consumed for origin in graph.origins(port)}
    lost = []
    for node in graph.operators:
        schema = dict(node.sides).get(ERRORS)
        if schema is not None and schema != LETTERS:
            raise PlanError(
                f"side output {ERRORS!r} of {node.uid!r} is for rows that the function fails on, "
                "with on_error='dead-letter'\n"
                f"  found: {schema_ddl(schema)}\n  expected: {schema_ddl(LETTERS)}\n"
                "  next: give your own rows another tag"
            )
        if Port(node.uid, ERRORS) not in taken and not isinstance(node.function, PartialProcess):
            lost.append(node.uid)
    if lost:
        warnings.warn(
            f"on_error='dead-letter': rows that {', '.join(lost)} fail on are counted and logged, "
            f"but kept nowhere; take .side({ERRORS!r}) to a sink",
            stacklevel=5,
        )
