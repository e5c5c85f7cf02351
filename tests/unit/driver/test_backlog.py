"""Rows not yet read, from the progress that Spark reports."""

from __future__ import annotations

from cairn.driver.backlog import backlog_of, total_backlog


def test_kafka_offsets_are_compared_partition_by_partition() -> None:
    source = {
        "endOffset": {"clicks": {"0": 10, "1": 20}},
        "latestOffset": {"clicks": {"0": 15, "1": 120, "2": 7}},
    }
    assert backlog_of({"sources": [source]}, ["clicks"]) == {"clicks": 105}


def test_offsets_may_be_numbers_or_json_text() -> None:
    sources = [
        {"endOffset": "3", "latestOffset": "10"},
        {"endOffset": '{"offset": 1}', "latestOffset": '{"offset": 4}'},
        {"endOffset": 9, "latestOffset": 8},
    ]
    found = backlog_of({"sources": sources}, ["a", "b", "c"])
    assert found == {"a": 7, "b": 3, "c": 0} and total_backlog(found) == 10


def test_a_source_that_reports_nothing_is_not_known() -> None:
    files = {"endOffset": {"logOffset": 3}, "latestOffset": None}
    odd = {"endOffset": "not json", "latestOffset": {"a": "b"}}
    found = backlog_of({"sources": [files, odd]}, ["files", "odd"])
    assert found == {"files": None, "odd": None} and total_backlog(found) is None


def test_progress_of_other_sources_says_nothing() -> None:
    assert backlog_of({"sources": []}, ["a"]) == {"a": None}
    assert backlog_of({}, ["a"]) == {"a": None}
