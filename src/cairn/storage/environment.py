"""Settings that name an environment variable: `env:NAME` keeps a secret out of the pickled job."""

from __future__ import annotations

import os
from typing import Final

from cairn.errors import PlanError

_PREFIX: Final = "env:"


def read_setting(value: str, what: str) -> str:
    """Return the value, or that of the variable it names; `what` names it in errors."""
    if not value.startswith(_PREFIX):
        return value
    name = value.removeprefix(_PREFIX)
    if name not in os.environ:
        raise PlanError(
            f"{what} is in the environment variable {name}, which is not set\n"
            f"  next: set {name} where the driver and the executors run"
        )
    return os.environ[name]
