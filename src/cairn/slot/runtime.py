"""The runtime of a slot: the levels of a job, with their state, from epoch to epoch.

    load(spec)     once per job, and again when a function was replaced
    level(index)   runs the epochs of one level
    look_up(ask)   returns state of some keys in one version, while epochs run

Always true here:
- state whose form fits is handed on when a function is replaced;
- a checkpoint that is not the driver's is refused before anything is made of the job;
- a task of before a change does not bring back the functions of then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from cairn.protocol.lookups import LookupReply, LookupRequest
from cairn.protocol.messages import Token
from cairn.protocol.spec import JobSpec
from cairn.slot.checkpoint import Open, open_checkpoint, open_existing
from cairn.slot.compactor import Compactor
from cairn.slot.feedback import InFlight
from cairn.slot.holding import Holding
from cairn.slot.level import LevelRuntime
from cairn.slot.memory import Room, describe_excess, private_bytes
from cairn.slot.parts import Parts
from cairn.slot.sweeper import Sweeper
from cairn.storage.log import Log
from cairn.storage.store import Store


class Runtime:
    """The levels of one job in one slot."""

    def __init__(
        self,
        *,
        scratch: str,
        store: Store | None = None,
        open_url: Open = open_existing,
        is_busy: Callable[[], bool] = lambda: False,
        threaded: bool = True,
    ) -> None:
        self.spec_id = ""
        self.spec: JobSpec | None = None
        self.compactor = Compactor(is_busy, threaded=threaded)
        self.sweeper = Sweeper(self._sweep, is_busy)
        self._scratch = scratch
        self._store = store
        self._open_url = open_url
        self._levels: dict[int, LevelRuntime] = {}
        self._holdings: dict[str, Holding] = {}
        self._in_flight = InFlight()
        self._parts = Parts()
        self._lock = threading.Lock()

    def load(self, spec_id: str, data: bytes, token: Token | None = None) -> None:
        """Take on a job, or the same job with other functions: state whose form fits is kept."""
        with self._lock:
            if spec_id == self.spec_id:
                return
            for level in self._levels.values():
                if token is not None:
                    # A task of before the change must not bring back the functions of then.
                    level.check(token)
            spec = JobSpec.unpickle(data)
            store = self._store or open_checkpoint(spec, token, self._open_url)
            log = Log(store)
            room = Room(spec.slot_memory_bytes)
            levels = {
                level.index: LevelRuntime(
                    spec,
                    level,
                    store,
                    log,
                    self._scratch,
                    self.compactor,
                    self._in_flight,
                    self._parts,
                    room,
                )
                for level in spec.levels
            }
            for index, level in self._levels.items():
                level.retire(levels.get(index))
            self._levels = levels
            held = [holding for level in levels.values() for holding in level.holdings]
            self._holdings = {holding.uid: holding for holding in held}
            self.spec, self.spec_id = spec, spec_id

    def level(self, index: int) -> LevelRuntime:
        return self._levels[index]

    def look_up(self, ask: LookupRequest) -> LookupReply:
        """From any thread."""
        holding = self._holdings.get(ask.uid)
        if holding is None:
            return LookupReply(None)
        places = list(zip(ask.groups, ask.keys, strict=True))
        found = holding.look_up(ask.state, ask.version, ask.form, places)
        return LookupReply(None) if found is None else LookupReply(*found)

    def memory_excess(self) -> str:
        """Return how near the slot is to its limit of memory; "" if it is not."""
        spec = self.spec
        if spec is None or not spec.slot_memory_bytes:
            return ""
        held = [level.state_held for level in list(self._levels.values())]
        entries = {uid: each.entries for states in held for uid, each in states.items()}
        return describe_excess(
            private_bytes(), spec.slot_memory_bytes, entries, is_heap=spec.backend == "heap"
        )

    def _sweep(self, seconds: float) -> bool:
        return any(level.sweep(seconds) for level in list(self._levels.values()))

    def close(self) -> None:
        self.sweeper.close()
        self.compactor.close()
        for level in self._levels.values():
            level.close()
        self._levels.clear()
        self._holdings = {}
