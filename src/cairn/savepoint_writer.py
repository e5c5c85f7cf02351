"""Savepoints made from DataFrames: a value corrected, state made of history, other key groups.

    writer = cairn.SavepointWriter.of(spark, "savepoints/monday")
    spent = spark.createDataFrame([("alice", 12.5)], "user string, value double")
    writer.patch("fraud", "spent", spent)
    writer.max_parallelism(256)
    writer.write("savepoints/corrected")

A writer only takes notes until `write`, and can write several times. Each method but `write`
gives the writer back, so calls can be chained. Rows have the columns that `cairn.read_state`
gives them; `key_group` is not looked at.

Always true here:
- what the savepoint is made of is not changed, but for a note in a checkpoint of where it is;
- rows that do not fit their state are refused, by their columns at once, by what is in them
  when they are written; then nothing is left behind;
- a savepoint that is made of nothing has no offsets: a job started from it reads its sources from
  their beginning, or from where their options say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import Function, find_states
from cairn.key_groups import key_hasher
from cairn.plan.check import check_name
from cairn.plan.levels import MAX_GROUP_COUNT
from cairn.protocol.scoped_state import SHARED_KEY, ScopedState, shared_uid
from cairn.query.state_writing import InExecutors
from cairn.snapshots.draft import Draft, draft_of, empty_draft
from cairn.snapshots.savepoint import SavepointInfo
from cairn.snapshots.writer import write_draft
from cairn.state import Broadcast, Declaration, OperatorList
from cairn.types import parse_schema, type_ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SUBTASK = {"subtask": "int"}


class SavepointWriter:
    """A savepoint to be written, made of another one or of nothing."""

    def __init__(self, draft: Draft, spark: SparkSession | None) -> None:
        self._draft = draft
        self._spark = spark

    @classmethod
    def of(
        cls,
        spark: SparkSession | None,
        url: str,
        *,
        epoch: int | None = None,
        spark_checkpoint: str | None = None,
    ) -> SavepointWriter:
        """Edit a savepoint, or an epoch of a checkpoint (by default the newest).

        Positions of sources, clocks and all state that is not named stay as they are.
        `spark_checkpoint` is that of the job, if it was started with one. The epoch of a running
        job is held for an hour after the last call, or for as long as the writer is there.
        Without Spark (None) all is done in this process, with Arrow tables as rows.
        """
        return cls(draft_of(str(url), epoch, spark_checkpoint), spark)

    @classmethod
    def empty(cls, job: str, *, max_parallelism: int = 128) -> SavepointWriter:
        """Begin with nothing: operators are declared, and their state is put."""
        _check_group_count(max_parallelism)
        return cls(empty_draft(job, max_parallelism), None)

    def max_parallelism(self, groups: int) -> SavepointWriter:
        """Another number of key groups: all state of keys, timers too, is laid out again."""
        _check_group_count(groups)
        self._draft.regroup(groups)
        return self

    def declare(
        self,
        operator: str,
        *,
        keys: Any = None,
        states: Mapping[str, Declaration] | None = None,
        function: Function | type[Function] | None = None,
    ) -> SavepointWriter:
        """An operator that the savepoint does not have yet, or other states of one it has.

        `keys` are columns with types, such as "account long"; of an operator that is there they
        may be left out, and other ones re-key it: then all of its state must be put again.
        Without keys it has lists of subtasks (`state.OperatorList`). States are given by name,
        or taken from a function. A state that is there and is declared alike keeps its rows.
        """
        check_name("operator", operator)
        declared = _find_states(operator, states, function)
        shared = {n: d for n, d in declared.items() if isinstance(d, Broadcast)}
        own = {n: d for n, d in declared.items() if n not in shared}
        there = self._draft.operators.get(operator)
        if keys is not None:
            key_types = _key_types(operator, keys)
        elif there is not None and there.scope == "keyed":
            key_types = there.key_types
        else:
            key_types = _SUBTASK
        is_keyed = key_types is not _SUBTASK
        for name, declaration in own.items():
            if isinstance(declaration, OperatorList) == is_keyed:
                raise PlanError(
                    f"operator {operator!r}: state {name!r} is "
                    f"{'a list of subtasks' if is_keyed else 'state of keys'}\n"
                    f"  found: {'keys' if is_keyed else 'no keys'}\n"
                    f"  next: {'leave keys= out' if is_keyed else 'give keys=, the key columns'}",
                    operator=operator,
                    state=name,
                )
        if own or is_keyed or not shared:
            entry = ScopedState(operator, "keyed" if is_keyed else "subtask", key_types, own)
            self._draft.declare(entry.uid, entry.scope, key_types, entry.decls)
        for name, declaration in shared.items():
            assert isinstance(declaration, Broadcast)
            key = {SHARED_KEY: declaration.key_ddl}
            entry = ScopedState(shared_uid(operator), "shared", key, {name: declaration})
            self._draft.declare(entry.uid, "shared", key, entry.decls)
        return self

    def put(self, operator: str, state: str, rows: DataFrame | pa.Table) -> SavepointWriter:
        """Replace a state as a whole. A key, or an entry of a map, may come once."""
        self._draft.give(operator, state, rows, self._schema(rows), put=True)
        return self

    def patch(self, operator: str, state: str, rows: DataFrame | pa.Table) -> SavepointWriter:
        """Set these keys, of a map these entries; a null value deletes.

        Of lists and timers all that a key has is replaced: a single row with a null value, or
        time, leaves it without.
        """
        self._draft.give(operator, state, rows, self._schema(rows), put=False)
        return self

    def remove(self, operator: str, state: str | None = None) -> SavepointWriter:
        """Leave out a state, or all of an operator."""
        self._draft.remove(operator, state)
        return self

    def rename(self, operator: str, new_uid: str) -> SavepointWriter:
        """The state of an operator goes to another uid."""
        check_name("operator", new_uid)
        self._draft.rename(operator, new_uid)
        return self

    def write(self, url: str) -> SavepointInfo:
        """Write the savepoint to an empty folder that the executors can reach, too."""
        rewriter = None if self._spark is None else InExecutors(self._spark)
        return write_draft(self._draft, str(url), rewriter)

    def _schema(self, rows: Any) -> pa.Schema:
        if isinstance(rows, pa.Table):
            return parse_schema(rows.schema)
        if not hasattr(rows, "sparkSession") or not hasattr(rows, "schema"):
            raise PlanError(
                f"rows of a state are a DataFrame or an Arrow table, found {type(rows).__name__}\n"
                "  next: make one with spark.createDataFrame(...)"
            )
        if rows.isStreaming:
            raise PlanError(
                "rows of a state come from a DataFrame that ends\n  found: a streaming one\n"
                "  next: read the same data with spark.read"
            )
        self._spark = self._spark or rows.sparkSession
        return parse_schema(rows.schema)


def _check_group_count(groups: int) -> None:
    if type(groups) is not int or not 1 <= groups <= MAX_GROUP_COUNT:
        raise PlanError(
            f"max_parallelism must be between 1 and {MAX_GROUP_COUNT}, found {groups!r}"
        )


def _key_types(operator: str, keys: Any) -> dict[str, str]:
    schema = parse_schema(keys)
    if not len(schema):
        raise PlanError(f"operator {operator!r}: a key needs at least one column, found none")
    if len({name.lower() for name in schema.names}) < len(schema):
        raise PlanError(
            f"operator {operator!r}: two key columns have one name\n"
            f"  found: {', '.join(schema.names)}\n"
            "  next: give each a name of its own, different by more than case",
            operator=operator,
        )
    key_hasher(schema.types)  # Refuses what has no key group.
    return {field.name: type_ddl(field.type) for field in schema}


def _find_states(
    operator: str,
    states: Mapping[str, Declaration] | None,
    function: Function | type[Function] | None,
) -> dict[str, Declaration]:
    found: dict[str, Declaration] = {}
    if function is not None:
        made = function
        if isinstance(function, type):
            try:
                made = function()
            except TypeError as error:
                raise PlanError(
                    f"operator {operator!r}: {function.__name__} cannot be made without arguments "
                    f"({error})\n  next: pass an object, function={function.__name__}(...)"
                ) from None
        if not isinstance(made, Function):
            raise PlanError(
                f"operator {operator!r}: function= is a KeyedProcess, a BatchProcess or a Process, "
                f"found {made!r}"
            )
        found |= find_states(made)
    for name, declaration in (states or {}).items():
        if not isinstance(name, str) or not name.isidentifier():
            raise PlanError(
                f"operator {operator!r}: no function can have a state {name!r}\n"
                "  expected: a name that an attribute of a class can have\n"
                "  next: give it another one; timers need no declaration",
                operator=operator,
                state=name,
            )
        if not isinstance(declaration, Declaration):
            raise PlanError(
                f"operator {operator!r}: state {name!r} is declared as {declaration!r}\n"
                "  expected: one of cairn.state, such as state.Value('double')",
                operator=operator,
                state=name,
            )
        found[name] = declaration
    return found
