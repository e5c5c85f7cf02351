"""Leadership by a lease, over a fake of the API with its faults."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from cairn.driver.coordinator.leadership import Member, open_leadership
from cairn.driver.coordinator.leadership.kubernetes import KubernetesGrant, KubernetesLeadership
from cairn.errors import PlanError
from cairn.storage.store import open_store
from tests.kubernetes_api import KubernetesApi

Open = Callable[[str], KubernetesLeadership]


@pytest.fixture
def api(tmp_path: Path, monkeypatch) -> Iterator[KubernetesApi]:
    made = KubernetesApi()
    monkeypatch.setenv("KUBECONFIG", str(made.write_kubeconfig(tmp_path / "kubeconfig")))
    yield made
    made.close()


@pytest.fixture
def group(api: KubernetesApi) -> Iterator[Open]:
    """Return members of one group; the lease is long, so nothing happens by itself."""
    made = []

    def open_one(identity: str) -> KubernetesLeadership:
        found = open_leadership("kubernetes:lease/fraud?lease=60s", store=open_store("memory:"))
        found.update(Member(identity=identity, host="h", pid=1))
        made.append(found)
        return found

    yield open_one
    for each in made:
        each.close()


def lead(member: KubernetesLeadership) -> KubernetesGrant:
    grant = member.poll()
    assert grant is not None
    grant.confirm(1)
    return grant


def lease(api: KubernetesApi) -> dict:
    return api.leases["jobs", "fraud"]


def test_the_first_member_creates_the_lease_and_the_next_one_waits(api, group) -> None:
    one, two = group("a"), group("b")
    lead(one)
    assert two.poll() is None
    spec = lease(api)["spec"]
    assert spec["holderIdentity"] == "a" and spec["leaseTransitions"] == 0
    assert spec["leaseDurationSeconds"] == 60
    assert two.leader().identity == "a" and [m.identity for m in one.waiting()] == ["b"]


def test_of_two_members_that_saw_the_same_lease_one_replaces_it(api, group) -> None:
    one, two = group("a"), group("b")
    lead(group("first")).resign()
    api.fail("PUT", 409)
    # One sees the free lease, and is beaten; two takes it afterwards.
    one._write_standby(one._member)
    two._write_standby(two._member)
    assert one.poll() is None
    assert two.poll() is not None and one.poll() is None
    assert api.holders == ["first", "", "b"]
    assert lease(api)["spec"]["leaseTransitions"] == 1


def test_a_replacement_on_an_old_version_is_refused(api, group) -> None:
    one = group("a")
    lead(one).resign()
    seen = one.leases.read("fraud")
    two = group("b")
    assert two.poll() is not None
    with pytest.raises(Exception) as refused:
        one.leases.write(seen)
    assert type(refused.value).__name__ == "ConflictError"
    assert lease(api)["spec"]["holderIdentity"] == "b"


def test_a_takeover_whose_answer_was_lost_is_found_by_its_holder(api, group) -> None:
    one = group("a")
    api.fail("POST", "lost", 2)
    assert one.poll() is None, "the lease of the standby, and the lease itself"
    assert lease(api)["spec"]["holderIdentity"] == "a"
    grant = one.poll()
    assert grant is not None and not grant.lost.is_set()
    assert group("b").poll() is None


def test_a_renewal_whose_answer_was_lost_keeps_the_lead(api, group) -> None:
    grant = lead(group("a"))
    api.fail("PUT", "lost")
    before = lease(api)["metadata"]["resourceVersion"]
    grant.renew()
    assert lease(api)["metadata"]["resourceVersion"] != before
    grant.renew()
    grant.renew()
    assert not grant.lost.is_set() and lease(api)["spec"]["holderIdentity"] == "a"


@pytest.mark.parametrize("fault", [500, 429, 409, "unreachable", "lost"])
def test_a_renewal_that_fails_leaves_the_lead_until_its_end(api, group, fault) -> None:
    grant = lead(group("a"))
    api.fail("PUT", fault, 3)
    grant.renew()
    assert not grant.lost.is_set()
    for _ in range(4):
        grant.renew()
    assert not grant.lost.is_set()


@pytest.mark.parametrize("fault", [500, 403, 409, "unreachable", "lost"])
def test_a_standby_goes_on_after_every_fault(api, group, fault) -> None:
    lead(group("first")).resign()
    one = group("a")
    for method in ("GET", "PUT", "POST"):
        api.fail(method, fault)
    assert any(one.poll() is not None for _ in range(6))


def test_a_standby_that_may_not_show_itself_takes_the_lead_all_the_same(api, group) -> None:
    """With a role for the one lease only, the API refuses the leases of standbys."""
    one, two = group("a"), group("b")
    grant = lead(one)
    api.fail("POST", 403, times=3)
    assert two.poll() is None
    grant.resign()
    assert two.poll() is not None


def test_a_leader_whose_lease_was_taken_loses_the_lead_and_writes_nothing(api, group) -> None:
    one, two = group("a"), group("b")
    grant = lead(one)
    # As if nothing had been renewed for a lease: two has waited.
    two.poll()
    two._seen["fraud"] = (two._seen["fraud"][0], two._seen["fraud"][1] - 100)
    assert two.poll() is not None
    grant.renew()
    assert grant.lost.is_set()
    grant.resign()
    assert lease(api)["spec"]["holderIdentity"] == "b"
    assert lease(api)["spec"]["leaseTransitions"] == 1


def test_an_earlier_grant_of_the_same_process_is_not_the_present_one(api, group) -> None:
    one = group("a")
    first = lead(one)
    first.lost.set()
    second = one.poll()
    assert second is not None
    first._deadline.lost.clear()
    first.resign()
    assert lease(api)["spec"]["holderIdentity"] == "a" and not second.lost.is_set()


def test_a_lease_that_was_deleted_ends_the_lead(api, group) -> None:
    grant = lead(group("a"))
    del api.leases["jobs", "fraud"]
    grant.renew()
    assert grant.lost.is_set()


def test_a_resignation_names_the_next_member(api, group) -> None:
    grant = lead(group("a"))
    one, two = group("b"), group("c")
    grant.resign(to="c")
    assert one.leader() is None
    assert one.poll() is None and two.poll() is not None
    assert "cairn/next" not in lease(api)["metadata"]["annotations"]


def test_dead_standbys_are_removed(api, group) -> None:
    leading = group("a")
    grant = lead(leading)
    group("b").poll()
    assert [m.identity for m in leading.waiting()] == ["b"]
    for name, (version, at_s) in [*leading._seen.items()]:
        leading._seen[name] = (version, at_s - 120)
    assert leading.waiting() == []
    grant.renew()
    assert [name for _, name in api.leases] == ["fraud"]


def test_a_standby_leaves_with_its_campaign(api, group) -> None:
    lead(group("a"))
    stop, one = threading.Event(), group("b")
    campaign = threading.Thread(
        target=one.campaign, args=(Member(identity="b", host="h", pid=1), stop)
    )
    campaign.start()
    while len(api.leases) < 2:
        stop.wait(0.01)
    stop.set()
    campaign.join(30)
    assert [name for _, name in api.leases] == ["fraud"]


def test_a_shorter_lease_of_a_standby_does_not_end_a_longer_one(api, group) -> None:
    lead(group("a"))
    eager = open_leadership("kubernetes:lease/fraud?lease=1s", store=open_store("memory:"))
    eager.update(Member(identity="b", host="h", pid=1))
    assert eager.poll() is None
    eager._seen["fraud"] = (eager._seen["fraud"][0], eager._seen["fraud"][1] - 30)
    assert eager.poll() is None


def test_urls(api, monkeypatch, tmp_path) -> None:
    store = open_store("memory:")
    found = open_leadership("kubernetes:lease/fraud", store=store)
    assert found.url == "kubernetes:lease/fraud?namespace=jobs&lease=15s"
    found = open_leadership("kubernetes:lease/fraud?namespace=x&lease=2s", store=store)
    assert found.url == "kubernetes:lease/fraud?namespace=x&lease=2s"
    for wrong in (
        "kubernetes:fraud", "kubernetes:lease/", "kubernetes:lease/A_b", "kubernetes:pod/x",
        "kubernetes:lease/x?session=2s",
    ):  # fmt: skip
        with pytest.raises(PlanError):
            open_leadership(wrong, store=store)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(PlanError, match="KUBECONFIG"):
        open_leadership("kubernetes:lease/fraud", store=store)


def test_the_manifests_of_the_docs_allow_what_a_member_does(api, group) -> None:
    page = Path(__file__).parents[5] / "docs" / "operations" / "high-availability.md"
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    account, role, binding, deployment = (
        each for block in blocks for each in yaml.safe_load_all(block)
    )
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    args = pod["containers"][0]["args"]
    assert open_leadership(args[args.index("--ha") + 1], store=open_store("memory:"))
    leading, standby = group("a"), group("b")
    grant = lead(leading)
    standby.poll()
    grant.renew()
    leading.waiting()
    grant.resign()
    standby.close()
    verbs = {"GET": "get", "POST": "create", "PUT": "update", "DELETE": "delete"}
    used = {verbs[each.split(" ")[0]] for each in api.requests if each.split(" ")[1]}
    lists = {"list" for each in api.requests if each == "GET "}
    created = {"create" for each in api.requests if each == "POST "}
    assert used | lists | created == set(role["rules"][0]["verbs"])
