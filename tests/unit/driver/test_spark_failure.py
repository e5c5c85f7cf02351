"""The user's own error is found in the text of Spark's errors, in a few lines."""

from __future__ import annotations

import logging
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from cairn import FunctionError, KeyedProcess
from cairn.driver.restarts import Restarts, parse_restart
from cairn.driver.spark_failure import as_cairn_error, is_spark_gone
from cairn.errors import EpochError
from cairn.protocol.messages import Failure, pack_failure
from cairn.testing import Harness

JVM = "\n\tat org.apache.spark.api.python.BasePythonRunner(PythonRunner.scala:1097)" * 40


class Picks(KeyedProcess):
    def process(self, row: Any, ctx: Any) -> Any:
        return {"known": 1}[row.v]


class OddError(Exception):
    pass


class Raises(KeyedProcess):
    def process(self, row: Any, ctx: Any) -> Any:
        raise OddError("odd")


def spark_text(function: KeyedProcess[Any], **facts: Any) -> str:
    """Return Spark's text for a slot whose function has failed."""
    with (
        pytest.raises(FunctionError) as raised,
        Harness(function, "k long, v string", "k", "n long") as harness,
    ):
        harness.push((1, "CAIRN-FAILURE:00;"))
    error = raised.value
    packed = pack_failure(Failure("FunctionError", error.message, {**error.facts, **facts}))
    return f"An error occurred while calling o1.collectToPython.\n: x\n{packed}\n{error}{JVM}"


def test_error_of_a_function_keeps_its_facts_and_says_what_to_do() -> None:
    error = as_cairn_error(RuntimeError(spark_text(Picks(), log="/tmp/slot-0.log")), 7)
    assert isinstance(error, FunctionError)
    assert (error.operator, error.key, error.epoch) == ("harness", "1", 7)
    assert error.cause == "KeyError('CAIRN-FAILURE:00;')"
    first, *rest = str(error).splitlines()
    assert first == ("process() of operator 'harness' raised KeyError: 'CAIRN-FAILURE:00;'")
    assert [line.partition(":")[0].strip() for line in rest] == ["key", "row", "at", "log", "next"]
    assert error.at.startswith(__file__) and error.at.endswith(" in process")


def test_the_cause_is_the_users_exception_and_not_sparks() -> None:
    error = as_cairn_error(RuntimeError(spark_text(Picks())), 7)
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.args == ("CAIRN-FAILURE:00;",)
    printed = "".join(traceback.format_exception(error))
    assert '{"known": 1}[row.v]' in printed
    assert "org.apache.spark" not in printed and len(printed.splitlines()) < 20


def test_an_exception_of_an_unknown_class_is_described_but_not_made_again() -> None:
    error = as_cairn_error(RuntimeError(spark_text(Raises())), 7)
    assert error.__cause__ is None and error.__suppress_context__
    assert "raised OddError: odd" in str(error) and error.cause_type == "OddError"


def test_all_that_spark_says_is_logged_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "cairn"):
        as_cairn_error(RuntimeError(spark_text(Picks())), 7)
    assert "org.apache.spark" in caplog.text
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


def test_function_that_spark_itself_calls_is_placed_in_the_users_file() -> None:
    text = (
        "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: "
        "Traceback (most recent call last):\n"
        '  File "/lib/python3/site-packages/pyspark/worker.py", line 9, in main\n    process()\n'
        '  File "/home/ann/job.py", line 12, in half\n    return 1 / n\n'
        '  File "/lib/python3/site-packages/numpy/core.py", line 3, in divide\n    raise x\n'
        f"ZeroDivisionError: division by zero\n SQLSTATE: 38000{JVM}"
    )
    error = as_cairn_error(RuntimeError(text), 7)
    assert isinstance(error, FunctionError)
    assert "raised ZeroDivisionError: division by zero" in str(error)
    assert error.at == "/home/ann/job.py:12 in half" and error.at in str(error)
    assert error.__cause__ is None and len(str(error).splitlines()) < 5


def test_error_of_sparks_own_says_its_first_line_and_where_the_rest_is() -> None:
    text = f"An error occurred while calling o77.collect.\n: java.io.IOException: disk full{JVM}"
    error = as_cairn_error(RuntimeError(text), 7)
    assert isinstance(error, EpochError) and error.text == text
    said, next_ = str(error).splitlines()
    assert said == "epoch 7 failed in Spark: java.io.IOException: disk full"
    assert next_.startswith("  next: ")


def test_a_cause_that_takes_more_than_a_text_is_shown_all_the_same() -> None:
    cut = "UnicodeDecodeError('utf-8', b'\\xff…"
    facts = {"cause_type": "UnicodeDecodeError", "cause": cut, "cause_text": "invalid start byte"}
    error = as_cairn_error(RuntimeError(pack_failure(Failure("FunctionError", "no", facts))), 7)
    assert isinstance(error, FunctionError)
    assert str(error.__cause__) == "UnicodeDecodeError: invalid start byte"


def test_a_traceback_that_was_cut_short_is_looked_through_in_linear_time() -> None:
    # Were each indented line matched in several ways, this would not end.
    text = "Traceback (most recent call last):\n" + '    File "a.py", line 1, in f\n' * 200 + "<"
    error = as_cairn_error(RuntimeError(text), 7)
    assert isinstance(error, EpochError)


def test_the_same_failure_of_a_new_slot_in_each_life_is_known_to_be_the_same() -> None:
    restarts = Restarts(parse_restart("exponential(1 second, 1 minute)"))
    pauses = [
        restarts.after(as_cairn_error(RuntimeError(spark_text(Picks(), log=f"/{life}.log")), life))
        for life in range(3)
    ]
    assert pauses == [1.0, 2.0, None]


def session_of(java_context: Any) -> Any:
    return SimpleNamespace(sparkContext=SimpleNamespace(_jsc=java_context))


def test_spark_is_gone_if_its_context_was_stopped_or_nothing_answers() -> None:
    def refuse() -> Any:
        raise ConnectionRefusedError("no JVM")

    def context(is_stopped: bool) -> Any:
        return SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: is_stopped))

    assert not is_spark_gone(session_of(context(False)))
    assert is_spark_gone(session_of(context(True)))
    assert is_spark_gone(session_of(SimpleNamespace(sc=refuse)))
    assert is_spark_gone(session_of(None)), "pyspark has forgotten a context that it stopped"
