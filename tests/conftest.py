"""For all tests.

Properties are tried with few examples, other ones in each run. For more of them:
CAIRN_EXAMPLES=1000 python -m pytest tests/property
"""

from __future__ import annotations

import os

from hypothesis import settings

EXAMPLES = int(os.environ.get("CAIRN_EXAMPLES", "25"))

# Machines are shared: how long an example takes says nothing about it.
settings.register_profile("cairn", deadline=None, max_examples=EXAMPLES)
settings.load_profile("cairn")
