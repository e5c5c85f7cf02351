"""Open the leadership that a URL names."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from cairn.driver.coordinator.leadership.base import Leadership
from cairn.driver.coordinator.leadership.in_store import StoreLeadership
from cairn.driver.coordinator.leadership.kubernetes import KubernetesLeadership
from cairn.driver.coordinator.leadership.zookeeper import ZooKeeperLeadership
from cairn.errors import PlanError
from cairn.storage.store import Store
from cairn.types.durations import duration_ms


def open_leadership(url: str, *, store: Store) -> Leadership:
    """Return the leadership at `url` for the checkpoint in `store`; PlanError for a bad URL."""
    scheme, _, rest = url.partition(":")
    place, _, query = rest.partition("?")
    parts = urlsplit(url)
    # The text before the @ may be a password, so no message may contain it.
    if any("@" in part for part in (parts.path, parts.query, parts.fragment)):
        raise PlanError(
            "the URL of a leadership has '@' where none can be\n"
            "  next: write the characters / ? # of a user or password as %2F %3F %23"
        )
    if scheme == "store":
        if place.strip("/"):
            raise PlanError("the leadership 'store:' has no path: it is kept in the checkpoint")
        options = parse_options(query, {"lease": "10s"})
        return StoreLeadership(store, lease_s=_seconds(options, "lease"))
    if scheme == "zookeeper":
        options = parse_options(query, {"session": "10s"})
        return ZooKeeperLeadership(url, session_s=_seconds(options, "session"))
    if scheme == "kubernetes":
        options = parse_options(query, {"lease": "15s", "namespace": ""})
        return KubernetesLeadership(
            place, lease_s=_seconds(options, "lease"), namespace=options["namespace"]
        )
    raise PlanError(
        f"unknown kind of leadership: {scheme!r}\n"
        "  expected: store:?lease=10s, zookeeper://h1:2181,h2/path?session=10s\n"
        "  or kubernetes:lease/NAME?lease=15s"
    )


def parse_options(query: str, defaults: dict[str, str]) -> dict[str, str]:
    """Return the options of a URL. PlanError for one that is not in `defaults`."""
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise PlanError(
            f"unknown option of a leadership: {unknown[0]!r}\n"
            f"  expected: {', '.join(sorted(defaults))}"
        )
    return {**defaults, **given}


def _seconds(options: dict[str, str], name: str) -> float:
    return duration_ms(options[name], name, positive=True) / 1000
