"""A wall clock that can be set, for the Python processes that find this module on their path.

The file that CAIRN_TEST_CLOCK names holds the seconds by which their clock is off. As on a machine
whose clock is set, the time of the boot moves with it; the monotonic clock does not.
"""

import os
import time

_OFFSET = os.environ.get("CAIRN_TEST_CLOCK")
_time = time.time


def _offset_s() -> float:
    try:
        with open(_OFFSET or "") as file:
            return float(file.read())
    except (OSError, ValueError):
        return 0.0


if _OFFSET:
    import psutil

    time.time = lambda: _time() + _offset_s()
    time.time_ns = lambda: int(time.time() * 1e9)
    _boot_s = psutil.boot_time()
    psutil.boot_time = psutil._pslinux.boot_time = lambda: _boot_s + _offset_s()
