// The page of a driver that waits: its own state, and where the leader is.

import { card, count, facts, h, replace, span, when } from "./dom.js";
import { driversCard, page, refusal } from "./drivers.js";

export function standby(root, live) {
  const title = h("h1", null, "");
  const state = h("div", { class: "slot" });
  const drivers = h("div", { class: "slot" });
  replace(root, title, state, drivers);

  function update() {
    const { lead } = live;
    const group = lead.group ?? {};
    title.textContent = lead.status === "restarting" ? "This driver restarts" : "This driver waits";
    replace(state, card(group.leader ? "Another driver leads the job" : "Nobody leads the job at this moment", { cls: group.this?.refusal ? "waits now-failed" : "waits" },
      h("p", { class: "soft" }, group.this?.refusal ? "This one would be refused: its program does not continue the state of the job." : group.leader ? "This one takes over when the leader is gone or hands over. Everything about the job is on the pages of the leader." : "A standby takes over when the lease of the last leader is over."),
      facts([
        group.leader ? ["leader", h("b", null, group.leader.host), `, pid ${group.leader.pid}, since `, when(group.leader.since_ms), `, ${span(live.nowMs - group.leader.since_ms)}`] : null,
        group.leader ? ["dashboard", page(group.leader, group.this)] : null,
        group.this ? ["this driver", `${group.this.host}, pid ${group.this.pid}, ${group.this.standby}, since `, when(group.this.since_ms)] : null,
        group.this?.epoch !== null && group.this?.epoch !== undefined ? ["epoch held", count(group.this.epoch)] : null,
        group.this?.refusal ? ["takes over", refusal(group.this)] : group.this ? ["takes over", "yes"] : null,
        lead.restart ? ["last restart", `${count(lead.restart.number)}, `, when(lead.restart.wall_ms), `, pause ${span(lead.restart.pause_ms)}: ${lead.restart.cause}`] : null,
        ["fail-overs", `${count(lead.failovers)}: the job of another driver, continued by this one`],
      ])));
    replace(drivers, driversCard(live));
  }
  update();
  return { update };
}
