"""Calls that begin at the same moment, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def at_once(*calls: Callable[[], Any]) -> list[Exception]:
    """What they raised, once all have ended."""
    errors: list[Exception] = []
    start = threading.Barrier(len(calls))

    def work(call: Callable[[], Any]) -> None:
        start.wait()
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
