"""Open the leadership that a URL names."""

from __future__ import annotations

from urllib.parse import parse_qsl

from cairn.driver.coordinator.leadership.base import Leadership
from cairn.driver.coordinator.leadership.in_store import StoreLeadership
from cairn.driver.coordinator.leadership.zookeeper import ZooKeeperLeadership
from cairn.errors import PlanError
from cairn.storage.store import Store
from cairn.types.durations import duration_ms


def open_leadership(url: str, *, store: Store) -> Leadership:
    """Return the leadership at `url` for the checkpoint in `store`; PlanError for a bad URL."""
    scheme = url.partition(":")[0]
    if scheme == "store":
        rest, _, query = url.removeprefix("store:").partition("?")
        options = parse_options(query, {"lease": "10s"})
        if rest.strip("/"):
            raise PlanError("the leadership 'store:' has no path: it is kept in the checkpoint")
        return StoreLeadership(store, lease_s=options["lease"])
    if scheme == "zookeeper":
        session_s = parse_options(url.partition("?")[2], {"session": "10s"})["session"]
        return ZooKeeperLeadership(url, session_s=session_s)
    raise PlanError(
        f"unknown kind of leadership: {scheme!r}\n  expected: store:?lease=10s or zookeeper://h1:2181,h2/path?session=10s"
    )


def parse_options(query: str, defaults: dict[str, str]) -> dict[str, float]:
    """Return the durations of a URL's options, in seconds."""
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise PlanError(
            f"unknown option of a leadership: {unknown[0]!r}\n"
            f"  expected: {', '.join(sorted(defaults))}"
        )
    return {
        name: duration_ms(given.get(name, default), name, positive=True) / 1000
        for name, default in defaults.items()
    }
