"""Half a minute of what `make soak` does for ten: kills, outages, rescales, readers that poll."""

from __future__ import annotations

import pytest

from tests.soak.schedule import schedule
from tests.soak.targets import TARGETS, new_site
from tests.soak.world import World

SEED = 6
SECONDS = 30


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_what_went_in_came_out_after_half_a_minute_of_kills(tmp_path):
    """No reader saw a part of an epoch, or one out of order, on the way."""
    names = list(TARGETS)
    pieces = [name for name in names if TARGETS[name].pieces]
    world = World(new_site(tmp_path), names, SEED)
    world.run(schedule(SEED, SECONDS, names, pieces), SECONDS)
    result = world.result()
    assert result["records_in_log"]["takeovers"] > 1, result["done"]
    for name, out in result["out"].items():
        assert out == result["in"], name
    for name, seen in result["readers"].items():
        assert seen["moments"] > 1 and seen["polls"] > 10, name
