"""Lines that every start of Spark prints are left out; all others reach stderr."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cairn.driver.spark_noise import VARIABLE, log_level

START = """WARNING: Using incubator modules: jdk.incubator.vector
Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties
26/11/16 11:36:16 WARN Utils: Your hostname, vm, resolves to a loopback address: 127.0.0.1
Setting default log level to "WARN".
To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).
26/11/16 11:36:18 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform
Setting Spark log level to "ERROR".
"""
ERROR = "26/11/16 11:36:18 ERROR SparkContext: Error initializing SparkContext.\n"


def relay(program: str) -> str:
    """Return what a program lets through; `jvm(text)` writes as the JVM would."""
    head = (
        "import os, subprocess, sys\n"
        "from cairn.driver.spark_noise import Relay\n"
        "relay = Relay()\n"
        "def jvm(text):\n"
        "    done = subprocess.run([sys.executable, '-c', 'import sys; sys.stderr.write('\n"
        "        'sys.argv[1])', text], stderr=relay.pipe, check=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_lines_of_a_usual_start_are_left_out() -> None:
    assert relay(f"jvm({START!r}); relay.finish()") == ""


def test_errors_and_unknown_lines_pass_and_so_does_a_last_line_without_an_end() -> None:
    text = START + ERROR + "Unrecognized VM option 'Foo'\n" + START + "half a line"
    shown = relay(f"jvm({text!r}); relay.finish()")
    assert shown == ERROR + "Unrecognized VM option 'Foo'\nhalf a line"


def test_everything_passes_once_spark_is_up() -> None:
    assert relay(f"relay.pass_everything(); jvm({START!r}); relay.finish()") == START


def test_copies_go_where_stderr_went_when_the_jvm_was_started() -> None:
    program = (
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"
        f"jvm({ERROR!r}); relay.finish()"
    )  # fmt: skip
    assert relay(program) == ERROR


@pytest.mark.parametrize(
    ("asked", "level"),
    [("", None), ("0", None), ("no", None), ("1", "WARN"), ("info", "INFO"), ("yes", "WARN")],
)
def test_the_environment_brings_the_log_back(
    asked: str, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    assert log_level() == level


def test_a_program_without_stderr_loses_what_the_jvm_prints_and_nothing_else() -> None:
    program = (
        "import os, subprocess, sys\n"
        "from cairn.driver.spark_noise import Relay\n"
        "os.close(2)\n"
        "relay = Relay()\n"
        "os.write(relay.pipe, b'lost\\n')\n"
        "relay.finish()\n"
        "print(relay._thread.is_alive())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"False\n")
