"""The version of cairn: driver and executors must have the same."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
