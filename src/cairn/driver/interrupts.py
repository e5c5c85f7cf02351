"""Ctrl-C without a traceback, and never in the middle of a call to the JVM.

Python raises KeyboardInterrupt wherever the main thread is. Inside a call to the JVM that leaves
half an answer on the connection, and the next call reads it as its own. So the main thread makes
no such call here: it waits for a thread that does, or Ctrl-C is held back until the call is over.

Always true here:
- a second Ctrl-C is never held back;
- handlers that the program has set up itself stay as they are;
- a program that is not interactive dies by SIGINT, as its caller expects, and prints no traceback.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, Final, TypeVar

T = TypeVar("T")

_SPARK_MODULES: Final = ("pyspark.context", "pyspark.core.context")


def is_interactive() -> bool:
    """True in a console or a notebook, where Ctrl-C ends a command and not the program."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def print_no_traceback() -> None:
    """Let Ctrl-C end the program silently. Other exceptions are printed as before."""
    if is_interactive() or sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def call_aside(work: Callable[[], T]) -> T:
    """Call `work` on a thread of its own and wait for it; Ctrl-C ends the wait, not the work.

    On another thread than the main one, and where somebody types, it is called directly.
    """
    if is_interactive() or threading.current_thread() is not threading.main_thread():
        return work()
    outcome: Future[T] = Future()
    context = contextvars.copy_context()

    def call() -> None:
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True, name="cairn-aside").start()
    return outcome.result()


class Held:
    """A Ctrl-C that is held back, if one was pressed."""

    is_pending = False


@contextlib.contextmanager
def hold_interrupts() -> Iterator[Held]:
    """Hold Ctrl-C back inside; it is raised at the end. A second one is not held back."""
    held = Held()
    before = _replaceable_handler()
    if before is None:
        yield held
        return

    def hold(number: int, frame: FrameType | None) -> None:
        if not held.is_pending:
            held.is_pending = True
            return
        if is_interactive():
            raise KeyboardInterrupt
        # The JVM ends with us, the slots with the JVM; the epoch under way never happened.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        # Spark's own handler would cancel the epoch under way.
        signal.signal(signal.SIGINT, before if is_interactive() else signal.default_int_handler)
    if held.is_pending:
        raise KeyboardInterrupt


def _replaceable_handler() -> Any:
    """The handler of SIGINT, if it is Python's or Spark's and this thread may change it."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGINT)
    is_sparks = getattr(handler, "__module__", None) in _SPARK_MODULES
    return handler if handler is signal.default_int_handler or is_sparks else None
