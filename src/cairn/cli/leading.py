"""The output of `leader`, and the commands of `handover`: who leads a job, and who waits."""

from __future__ import annotations

import os
import time
from typing import Any, Final

import msgspec
from rich.text import Text

from cairn.cli.serving import CONTROL_TOKEN, TOKEN
from cairn.cli.tables import (
    head,
    print_json,
    printable,
    seconds_since,
    status_text,
    stdout_console,
    table,
    when,
)
from cairn.client import Client, client
from cairn.driver.coordinator.leadership.base import Member
from cairn.errors import EpochError, PlanError
from cairn.query.leading import LeadReport
from cairn.report.status import ACTIVE
from cairn.report.text import age

POLL_S: Final = 0.2


def print_lead(found: LeadReport) -> None:
    console = stdout_console()
    console.print(head(found.checkpoint, found.job))
    console.print(status_text(found.health), soft_wrap=True)
    driver, group = found.driver, found.group
    if group is None:
        console.print(Text("no group: the job was started without ha", "dim"))
        if driver is not None:
            led = "leads" if found.health.status in ACTIVE else "led last"
            where = f"{driver.host}, pid {driver.pid}, {led}, since {when(driver.wall_ms)}"
            console.print(where, soft_wrap=True)
        return
    console.print(Text.assemble(("group  ", "dim"), group.url), soft_wrap=True)
    console.print(_leader_text(found), soft_wrap=True)
    if not group.standbys:
        console.print(Text("no driver waits: nobody would take over", "yellow"))
        return
    shown = table("waits", "pid", "for", "state", "epoch", "url")
    for member in group.standbys:
        epoch = "" if member.epoch is None else str(member.epoch)
        waited = age(seconds_since(member.since_ms))
        shown.add_row(
            member.host, str(member.pid), waited, member.standby, epoch, member.url or "none"
        )
    console.print(shown)
    for member in group.standbys:
        if member.refusal is not None:
            console.print(refusal_text(member), soft_wrap=True)


def _leader_text(found: LeadReport) -> Text:
    driver, group = found.driver, found.group
    assert group is not None, "there is one"
    leader = group.leader
    if leader is None:
        text = Text.assemble(("leader ", "dim"), ("nobody", "bold yellow"))
        if driver is not None:
            text.append(f"; the last was {driver.host}, pid {driver.pid}", "dim")
        return text
    ago = age(seconds_since(leader.since_ms))
    return Text.assemble(
        ("leader ", "dim"),
        (f"{leader.host}, pid {leader.pid}", "bold green"),
        f"  since {when(leader.since_ms)}, {ago} ago  {leader.url or 'no url'}",
    )


def refusal_text(member: Member) -> Text:
    first, *rest = (member.refusal or "").splitlines()
    text = Text.assemble((f"{member.host} would be refused: ", "bold red"), printable(first))
    for line in rest:
        text.append(f"\n  {printable(line.strip())}", "dim")
    return text


def hand_over(urls: list[str], *, to: str | None, timeout_s: float, as_json: bool) -> None:
    """Pass the lead of a job on, and wait until another driver leads."""
    token, control = os.environ.get(TOKEN) or None, os.environ.get(CONTROL_TOKEN) or None
    if control is None:
        raise PlanError(
            f"a hand-over needs the control token of the job\n  next: set {CONTROL_TOKEN}"
        )
    with client(urls, token, control_token=control) as job:
        began_s = time.monotonic()
        successor = msgspec.convert(job.handover(to), Member)
        leader = _await_leader(job, successor, began_s + timeout_s)
        took_s = time.monotonic() - began_s
    if as_json:
        print_json({"leader": leader, "successor": successor, "seconds": round(took_s, 3)})
        return
    where = f"{leader.host}, pid {leader.pid}"
    if leader.identity != successor.identity:
        where += f" (not {successor.host}, pid {successor.pid}, which was chosen)"
    text = Text.assemble((where, "bold green"), f" leads, after {took_s:.1f} s")
    text.append(f"  {leader.url or 'no url'}", "dim")
    stdout_console().print(text, soft_wrap=True)


def _await_leader(job: Client, successor: Member, deadline_s: float) -> Member:
    """Wait until another driver leads than the one that has resigned; return it."""
    resigned: str | None = None
    while True:
        found: dict[str, Any] = job.leader()
        group = found["group"] or {}
        leader = None if group.get("leader") is None else msgspec.convert(group["leader"], Member)
        if leader is not None and leader.identity == successor.identity:
            return leader
        if resigned is None and found["live"] and not found["is_leader"]:
            # The driver that was asked waits by now.
            resigned = (group.get("this") or {}).get("identity")
        if leader is not None and resigned is not None and leader.identity != resigned:
            return leader
        if time.monotonic() >= deadline_s:
            raise EpochError(
                f"no driver has taken over: {successor.host}, pid {successor.pid}, was chosen\n"
                "  next: see its log, and cairn leader CHECKPOINT"
            )
        time.sleep(POLL_S)
