"""How cairn logs: fields on every record, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cairn import KeyedProcess, PlanError, logs
from cairn.testing import Harness


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    kept = {log: (list(log.handlers), log.level, log.propagate) for log in (logs.logger, root)}
    yield
    for log, (handlers, level, propagate) in kept.items():
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_says_when_what_and_where() -> None:
    logs.configure("json", stream=(out := io.StringIO()))
    with logs.scope(job="fraud", epoch=42):
        logs.logger.info("epoch %d committed", 42, extra={"rows_in": 7})
    (line,) = lines(out)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "message": "epoch 42 committed",
        "logger": "cairn",
        "job": "fraud",
        "epoch": 42,
        "rows_in": 7,
    }


def test_an_error_is_one_line_with_its_traceback() -> None:
    logs.configure("json", stream=(out := io.StringIO()))
    try:
        raise ValueError("no\nsuch thing")
    except ValueError:
        logs.logger.exception("failed", extra={"what": {1, 2}})
    (line,) = lines(out)
    assert "ValueError: no\nsuch thing" in line["error"] and line["what"] == "{1, 2}"


def test_a_line_of_text_says_where() -> None:
    logs.configure(stream=(out := io.StringIO()))
    logs.logger.info("hello")
    with logs.scope(job="fraud", epoch=42, subtask=1):
        logs.logger.warning("driver")
        with logs.scope(operator="score"):
            logs.logger.warning("slot")
    plain, driver, slot = (line.split(" ", 1)[1] for line in out.getvalue().splitlines())
    assert plain == "INFO hello"
    assert driver == "WARNING fraud: driver"
    assert slot == "WARNING fraud epoch 42 score[1]: slot"


def test_scopes_end_and_are_of_one_thread() -> None:
    logs.configure("json", stream=(out := io.StringIO()))
    with logs.scope(job="a"):
        with pytest.raises(RuntimeError), logs.scope(job="b", epoch=1):
            raise RuntimeError
        other = threading.Thread(target=logs.logger.info, args=("elsewhere",))
        other.start()
        other.join()
        logs.logger.info("here")
    assert [line.get("job") for line in lines(out)] == [None, "a"]


def test_records_carry_the_fields_whatever_handler_a_program_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with logs.scope(job="fraud"):
        logs.logger.warning("told", extra={"epoch": 3})
    (record,) = caplog.records
    found = vars(record)
    assert [found[name] for name in logs.FIELDS] == ["fraud", 3, None, None]


def test_configuring_twice_says_everything_once() -> None:
    logs.configure("text", stream=(first := io.StringIO()))
    logs.configure("json", stream=(second := io.StringIO()), level="WARNING")
    logs.logger.info("quiet")
    logs.logger.warning("loud")
    assert first.getvalue() == "" and [line["message"] for line in lines(second)] == ["loud"]


def test_slots_log_in_the_format_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.FORMAT_VARIABLE, raising=False)
    assert logs.current_format() == "text" and not logs.configure_from_environment()
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "json")
    assert logs.current_format() == "json" and logs.configure_from_environment()
    assert logs.current_format() == "json"
    logs.configure("text")
    assert logs.current_format() == "text"


def test_a_format_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "xml")
    with pytest.raises(PlanError, match=r"unknown format 'xml'\n  expected: one of text, json"):
        logs.configure_from_environment()


class Talks(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        logging.getLogger("mine").info("row %s", row.k)


def test_what_a_function_logs_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", out := io.StringIO())
    logs.configure_slot("json")
    where = logs.scope(job="fraud", epoch=2, subtask=0)
    with Harness(Talks(), "k string", "k", "k string") as harness, where:
        harness.push(("a",))
    (line,) = [line for line in lines(out) if line["logger"] == "mine"]
    assert line["message"] == "row a" and line["operator"] == "harness"
    assert (line["job"], line["epoch"], line["subtask"]) == ("fraud", 2, 0)


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("not shown")


def test_no_record_is_lost_for_what_it_carries() -> None:
    logs.configure("json", stream=(out := io.TextIOWrapper(io.BytesIO(), encoding="utf-8")))
    loop: list[Any] = []
    loop.append(loop)
    extras: list[dict[str, Any]] = [
        {"odd": {(1, 2): 3}},
        {"odd": loop},
        {"odd": Shy()},
        {"odd": float("nan")},
        {"odd": "\ud800"},
    ]
    for extra in extras:
        logs.logger.info("told", extra={**extra, "rows": 7})
    logs.logger.info("%d of %s", "two", Shy())
    out.seek(0)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = [json.loads(line, parse_constant=refuse) for line in out.read().splitlines()]
    assert [(line["message"], line["rows"]) for line in found[:-1]] == [("told", 7)] * len(extras)
    assert [line["odd"] for line in found[:-1]] == [
        "{(1, 2): 3}", "[[...]]", "<Shy that cannot be shown>", "nan", "\ud800"
    ]  # fmt: skip
    assert found[-1]["message"].startswith("%d of %s")


def test_what_a_record_carries_does_not_hide_when_and_how_grave_it_was() -> None:
    logs.configure("json", stream=(out := io.StringIO()))
    logs.logger.warning("told", extra={"time": "never", "level": 3}, stack_info=True)
    (line,) = lines(out)
    assert line["level"] == "warning" and line["time"].endswith("Z")
    assert (line["extra_time"], line["extra_level"]) == ("never", 3)
    assert "test_logs" in line["stack"]
