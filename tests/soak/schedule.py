"""What is done to a job, and when: all of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

DRIVER_POINTS = (
    "driver.epoch.ran",
    "driver.pack.written",
    "driver.manifest.written",
    "driver.sinks.committed",
    "driver.epoch.ended",
)
"""From the last prepare to the end of the epoch, of no sink in particular."""

SINK_POINTS = (
    "driver.sink.begun",
    "driver.sink.piece",
    "driver.sink.unmarked",
    "driver.sink.committed",
)
"""While one sink commits."""

WEIGHTS = {
    "kill driver": 3,
    "kill driver and JVM": 2,
    "kill driver at": 4,
    "kill slot": 5,
    "hang slot": 2,
    "stop postgres": 2,
    "hang redis": 1,
    "rescale": 3,
}


@dataclass(frozen=True)
class Disturbance:
    after_s: float
    """Since the one before was over and the job had made progress."""
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"+{self.after_s:.1f} s {self.kind} {self.detail}".rstrip()


def matrix(names: Sequence[str], pieces: Sequence[str]) -> list[str]:
    """Every place where a driver may die with something prepared: POINT[@TARGET]."""
    places = list(DRIVER_POINTS)
    for name in names:
        points = [p for p in SINK_POINTS if name in pieces or p != "driver.sink.piece"]
        places += [f"{point}@{name}" for point in points]
    return places


def schedule(
    seed: int, seconds: float, names: Sequence[str], pieces: Sequence[str]
) -> list[Disturbance]:
    """More of them than there is time for."""
    chance = random.Random(seed)
    weights = dict(WEIGHTS)
    if not any(name in ("postgres", "upsert", "prepared") for name in names):
        del weights["stop postgres"]
    if "redis" not in names:
        del weights["hang redis"]
    made: list[Disturbance] = []
    while sum(each.after_s for each in made) < seconds:
        (kind,) = chance.choices(list(weights), list(weights.values()))
        detail = {
            "kill driver at": chance.choice(matrix(names, pieces)),
            "kill slot": str(chance.randrange(4)),
            "hang slot": f"{chance.randrange(4)} for {chance.uniform(0.5, 3):.1f} s",
            "stop postgres": f"for {chance.uniform(1, 20 if seconds > 120 else 4):.1f} s",
            "hang redis": f"for {chance.uniform(1, 8 if seconds > 120 else 3):.1f} s",
            "rescale": str(chance.randint(1, 4)),
        }.get(kind, "")
        # Some in quick succession; in a long run others late, so that many epochs pass in peace.
        is_late = seconds > 120 and chance.random() < 0.6
        after_s = chance.uniform(4, 16) if is_late else chance.uniform(0.2, 4)
        made.append(Disturbance(round(after_s, 1), kind, detail))
    return made
