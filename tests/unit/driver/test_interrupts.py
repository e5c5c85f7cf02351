"""Ctrl-C in programs of their own: real signals, no Spark."""

from __future__ import annotations

import signal
import subprocess
import sys

HEAD = """
import os, signal, sys, threading, time
from cairn.driver.interrupts import call_aside, hold_interrupts, print_no_traceback

def press():
    os.kill(os.getpid(), signal.SIGINT)

print_no_traceback()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + program], capture_output=True, text=True, timeout=60
    )


def test_ctrl_c_ends_a_program_by_its_signal_and_without_a_traceback() -> None:
    done = run("try:\n    press()\nfinally:\n    print('cleaned up')")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "cleaned up\n", "")


def test_other_errors_keep_their_traceback() -> None:
    done = run("raise ValueError('mine')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ValueError: mine" in done.stderr


def test_ctrl_c_is_held_back_until_the_call_is_over() -> None:
    done = run(
        "with hold_interrupts() as held:\n"
        "    press()\n"
        "    print('goes on', held.is_pending)\n"
        "print('never')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "goes on True\n", "")


def test_a_second_ctrl_c_is_not_held_back() -> None:
    done = run("with hold_interrupts():\n    press()\n    press()\n    print('never')")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_error_inside_goes_before_ctrl_c_and_the_handler_is_put_back() -> None:
    done = run(
        "try:\n"
        "    with hold_interrupts():\n"
        "        press()\n"
        "        raise ValueError('mine')\n"
        "except ValueError:\n"
        "    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_a_handler_of_the_programs_own_is_left_alone() -> None:
    done = run(
        "signal.signal(signal.SIGINT, lambda *_: print('mine'))\n"
        "with hold_interrupts() as held:\n"
        "    press()\n"
        "    print(held.is_pending)\n"
        "press()"
    )
    assert (done.returncode, done.stdout) == (0, "mine\nFalse\nmine\n")


def test_ctrl_c_ends_the_wait_for_a_call_and_not_the_call() -> None:
    done = run(
        "over = threading.Event()\n"
        "def work():\n"
        "    press()\n"
        "    over.wait()\n"
        "    print('whole', flush=True)\n"
        "    done.set()\n"
        "done = threading.Event()\n"
        "try:\n"
        "    call_aside(work)\n"
        "finally:\n"
        "    over.set()\n"
        "    done.wait()\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "whole\n", "")


def test_a_call_aside_returns_and_raises_what_the_call_does() -> None:
    done = run(
        "print(call_aside(lambda: threading.current_thread() is threading.main_thread()))\n"
        "try:\n"
        "    call_aside(lambda: 1 // 0)\n"
        "except ZeroDivisionError:\n"
        "    print('raised')"
    )
    assert (done.returncode, done.stdout) == (0, "False\nraised\n")
