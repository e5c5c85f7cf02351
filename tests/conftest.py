"""For all tests.

Properties are tried with few examples, other ones in each run. For more of them:
CAIRN_EXAMPLES=1000 python -m pytest tests/property
"""

from __future__ import annotations

import os
import signal

from hypothesis import settings

EXAMPLES = int(os.environ.get("CAIRN_EXAMPLES", "25"))

# Machines are shared: how long an example takes says nothing about it.
settings.register_profile("cairn", deadline=None, max_examples=EXAMPLES)
settings.load_profile("cairn")

# A shell ignores Ctrl-C for what it runs in the background, and programs that are started inherit
# that. Those of tests must see the signals they are sent.
signal.signal(signal.SIGINT, signal.default_int_handler)
