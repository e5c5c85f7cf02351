"""Messages about a service that fails."""

from __future__ import annotations

from cairn.driver.coordinator.leadership.outage import Outage


def test_an_outage_is_reported_once_and_without_its_text(caplog) -> None:
    outage = Outage("the service")
    for _ in range(3):
        outage.note(OSError("user:secret"))
    outage.note(ValueError("secret"))
    outage.end()
    outage.end()
    outage.note(OSError("secret"))
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the service: OSError",
        "the service: ValueError",
        "the service: OSError",
    ]
