"""For all tests.

Properties are tried with few examples, other ones in each run. For more of them:
CAIRN_EXAMPLES=1000 python -m pytest tests/property

Tests marked `soak` run with CAIRN_SOAK=1 only, as `make soak` does.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

EXAMPLES = int(os.environ.get("CAIRN_EXAMPLES", "7"))

# Machines are shared: how long an example takes says nothing about it.
settings.register_profile("cairn", deadline=None, max_examples=EXAMPLES)
settings.load_profile("cairn")

# A shell ignores Ctrl-C for what it runs in the background, and programs that are started inherit
# that. Those of tests must see the signals they are sent.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `soak` out, unless they are asked for."""
    if os.environ.get("CAIRN_SOAK"):
        return
    long = [item for item in items if item.get_closest_marker("soak") is not None]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]
