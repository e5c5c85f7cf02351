"""Commits of a harness: epochs in a log, state in files, in a store in memory.

Always true here:
- what is restored has been through files, in the stored format;
- one subtask owns every key group.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

from cairn.driver.coordinator.ranges import advance, apply_compaction, ranges_for
from cairn.ids import new_id
from cairn.protocol.messages import Begin, OperatorAck
from cairn.protocol.scoped_state import ScopedState
from cairn.slot.holding import Holding
from cairn.slot.restore import restore, write_base
from cairn.storage.files import StateFile, encode_segment
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, EpochOperator, RangeState, SparkPosition
from cairn.storage.pack import write_segment
from cairn.storage.store import open_store

GROUP_COUNT = 128


class Checkpoint:
    """The epochs of one harness."""

    def __init__(self, states: Mapping[str, ScopedState], now_ms: int) -> None:
        self.newest: Epoch | None = None
        self.states = states
        self._store = open_store("memory:")
        self._log = Log(self._store)
        self.term = self._log.take_over(host="harness", pid=0, wall_ms=now_ms).term

    @property
    def next_number(self) -> int:
        assert self._log.last is not None, "the harness has taken over"
        return self._log.last + 1

    @property
    def parent(self) -> int | None:
        return None if self.newest is None else self.newest.number

    @property
    def now_ms(self) -> int:
        """The time of the newest epoch."""
        return 0 if self.newest is None else self.newest.now_ms

    def range_of(self, uid: str) -> RangeState:
        entry = None if self.newest is None else self.newest.operators[uid]
        (part,) = ranges_for(entry, 1, GROUP_COUNT)
        return part

    def versions(self) -> dict[str, str]:
        return {uid: self.range_of(uid).version for uid in self.states}

    def settle(self, held: Holding) -> None:
        """Promote or undo what is held beyond the newest epoch."""
        missing = held.bring_to(self.range_of(held.uid).version, range(GROUP_COUNT), [])
        assert not missing, "the harness's operator is at the newest epoch or one ahead of it"

    def restore(self, held: Holding) -> None:
        """Fill what is empty from the files of the newest epoch."""
        version = self.range_of(held.uid).version
        missing = held.bring_to(version, range(GROUP_COUNT), [])
        if self.newest is not None:
            with tempfile.TemporaryDirectory() as scratch:
                restore(held, self._store, self.newest, missing, scratch)
        held.version = version

    def write_delta(self, held: Holding, uid: str) -> StateFile | None:
        """Write what the epoch has changed."""
        parts = held.delta(uid)
        if not parts:
            return None
        number = self.next_number
        segment = encode_segment("delta", held.uid, parts, first_epoch=number, last_epoch=number)
        return write_segment(self._store, segment, self.term)

    def advance(
        self, held: Holding, delta: StateFile | None, rows: int, part: RangeState | None = None
    ) -> RangeState:
        """Return its range after the epoch; `part` is the one before, if not as committed."""
        ack = OperatorAck(held.uid, rows, 0, held.keys_changed(), delta)
        before = self.range_of(held.uid) if part is None else part
        return advance(before, ack, self.next_number, held.state_held())

    def rebase(self, held: Holding, begin: Begin, rows: int) -> RangeState:
        """Return its range with one base in place of all files."""
        part = self.range_of(held.uid)
        if not part.files:
            return part
        base = held.backend.begin_base(held.tables, held.groups)
        with tempfile.TemporaryDirectory() as scratch:
            written = write_base(base, held.uid, held.groups, self._store, begin, scratch)
        base.close()
        based = apply_compaction(part, written)
        assert based is not None, "a base of the newest epoch fits"
        return self.advance(held, None, rows, based)

    def append(self, ranges: Mapping[str, RangeState], *, now_ms: int, wall_ms: int) -> None:
        """Commit an epoch."""
        operators = {
            uid: EpochOperator(
                uid=uid,
                function_version="",
                key_types=state.key_types,
                states=state.decls,
                parallelism=1,
                ranges=[ranges[uid]],
                scope=state.scope,
            )
            for uid, state in self.states.items()
        }
        parent = self.parent
        self.newest = self._log.append(
            lambda number: Epoch(
                number=number,
                parent=parent,
                term=self.term,
                nonce=new_id(),
                wall_ms=wall_ms,
                now_ms=now_ms,
                watermarks={},
                spark=SparkPosition(folder="", batch_id=number, offsets=""),
                operators=operators,
            )
        )
