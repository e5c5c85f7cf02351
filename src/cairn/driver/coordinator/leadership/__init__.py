"""Leadership: which of several drivers of one job runs it."""

from cairn.driver.coordinator.leadership.base import Grant, Leadership, Member
from cairn.driver.coordinator.leadership.opening import open_leadership

__all__ = ["Grant", "Leadership", "Member", "open_leadership"]
