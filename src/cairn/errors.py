"""Every error cairn raises, as one tree.

CairnError
├── PlanError                 the job is wrong; nothing has run
├── RestoreError
│   ├── StateSchemaError      stored state and declared state do not fit
│   ├── KeyGroupCountError    max_parallelism differs from the checkpoint's
│   └── CorruptFileError      a stored file does not match its checksum
├── CommitError
│   ├── CommitConflictError   certainly not published: another leader is ahead
│   └── CommitUnknownError    may be published; look before retrying
├── EpochError                an epoch failed for a reason outside user code
├── FunctionError             user code raised, or its output does not fit
└── QueryError
    ├── StateNotFoundError
    └── StaleEpochError       the epoch is not kept, or is not there
        └── NoEpochError      the job has not committed one yet

A message names the thing, what was expected and found, and the next step;
the same facts are attributes of the exception.
"""

from __future__ import annotations

from typing import Any


class CairnError(Exception):
    """Base of all errors raised by cairn. Keyword facts become attributes."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts")
        if facts is not None and name in facts:
            return facts[name]
        raise AttributeError(name)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(cls: type[CairnError], message: str, facts: dict[str, Any]) -> CairnError:
    return cls(message, **facts)


class PlanError(CairnError):
    """The job is wrong. Nothing has run."""


class RestoreError(CairnError):
    """Stored state cannot be brought back as the job asks."""


class StateSchemaError(RestoreError):
    """The stored state and the declared state do not fit."""


class KeyGroupCountError(RestoreError):
    """max_parallelism differs from the one the checkpoint was made with."""


class CorruptFileError(RestoreError):
    """A stored file is damaged: it does not match its checksum or its format."""


class CommitError(CairnError):
    """An epoch could not be published."""


class CommitConflictError(CommitError):
    """Certainly not published: another driver has taken over this checkpoint."""


class CommitUnknownError(CommitError):
    """May be published: the store did not say. Look before retrying."""


class EpochError(CairnError):
    """An epoch failed for a reason outside user code, after all retries."""


class FunctionError(CairnError):
    """User code raised, or returned what does not fit: operator, key, row, cause."""


class QueryError(CairnError):
    """State could not be read."""


class StateNotFoundError(QueryError):
    """No such operator or state."""


class StaleEpochError(QueryError):
    """The epoch asked for is gone or not there yet."""


class NoEpochError(StaleEpochError):
    """The job has not committed its first epoch yet: there is nothing to read until then."""
