"""The drivers of the job as JSON: GET /api/leader, also of a driver that waits."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.driver.group import Group
from cairn.query.leading import Driver, newest_driver
from cairn.report.status import ACTIVE, Restart, Status
from cairn.storage.log import job_of
from cairn.web.answers import json_response
from cairn.web.openapi import Docs, operation
from cairn.web.site import Site


class LeadView(msgspec.Struct, frozen=True, kw_only=True):
    """The drivers of a job, as this server sees them."""

    name: str | None
    status: Status
    """The status of the run in this process; without one, that of the job."""
    is_leader: bool
    """The run in this process leads the job."""
    waiting: bool
    """The run in this process waits for the lead: everything else is at the leader."""
    live: bool
    """The run is in this process."""
    driver: Driver | None
    """The driver that took over last, as the log has it."""
    group: Group | None
    """None if the job has no group, or it cannot be seen from here."""
    group_url: str | None
    """The address of the group, without secrets."""
    restart: Restart | None
    """The last restart of the run in this process."""
    restarts: int
    failovers: int


def lead(site: Site) -> LeadView:
    """Return who leads the job now."""
    run, group = site.run, site.group()
    about = None if run is not None else job_of(site.store)
    restarted = [] if run is None else run.restart_history()
    status = site.health().status if run is None else run.status
    url = None if group is None else group.url
    if run is None:
        url = url or site.group_url()
    return LeadView(
        name=run.name if run is not None else None if about is None else about.name,
        status=status,
        is_leader=run is not None and run.status in ACTIVE and not run.is_waiting,
        waiting=run is not None and run.is_waiting,
        live=run is not None,
        driver=newest_driver(site.log),
        group=group,
        group_url=url,
        restart=restarted[-1] if restarted else None,
        restarts=0 if run is None else run.restarts,
        failovers=0 if run is None else run.failovers,
    )


def routes(site: Site) -> list[Route]:
    def get_leader(request: Request) -> Response:
        return json_response(lead(site))

    return [Route("/api/leader", get_leader)]


DOCS: Final[Docs] = {
    "/api/leader": {
        "get": operation(
            "Who leads the job, and who waits; a driver that waits answers this itself",
            answer=LeadView,
        )
    }
}
