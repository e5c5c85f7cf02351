// The dashboard: routes to pages, and the header around them.

import { ApiError, Live, logOut } from "./api.js";
import { count, empty, h, replace, span } from "./dom.js";
import { charts } from "./page-charts.js";
import { control } from "./page-control.js";
import { epoch, epochs } from "./page-epochs.js";
import { errors } from "./page-errors.js";
import { groups } from "./page-groups.js";
import { history } from "./page-history.js";
import { operator } from "./page-operator.js";
import { overview } from "./page-overview.js";
import { standby } from "./page-standby.js";
import { states } from "./page-state.js";

const PAGES = [
  { path: "", name: "Overview", page: overview },
  { path: "epochs", name: "Epochs", page: epochs, inner: epoch },
  { path: "charts", name: "Charts", page: charts },
  { path: "groups", name: "Key groups", page: groups },
  { path: "state", name: "State", page: states },
  { path: "history", name: "History", page: history },
  { path: "errors", name: "Errors", page: errors },
  { path: "control", name: "Control", page: control, isShown: (live) => live.job?.control === true },
  { path: "operators", name: "Operator", page: overview, inner: operator, isShown: () => false },
];
// The guide explains these words too.
const STATUS = {
  starting: "A driver leads the job and has not committed its first epoch",
  running: "Epochs are being committed",
  idle: "No epoch is running, and none was committed for a while: no input",
  behind: "Rows arrive, and the watermark lags over a minute more than declared",
  paused: "A sink cannot publish; the next epoch waits for it",
  failing: "An attempt at the current epoch has failed, and is retried",
  failed: "The run ended with an error, or its driver was killed",
  stopped: "The run was stopped",
  finished: "The run has read all of its input",
  standby: "Another driver leads the job; this one waits",
  restarting: "The run failed, and begins again after a pause",
  superseded: "Another driver has taken over the job, or a rollback has ended this run",
  unknown: "The driver is on another machine, and has written nothing for a minute",
};

const live = new Live();
const byId = (id) => document.getElementById(id);
let shown = null;
let wasWaiting = false;

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  const found = PAGES.find((each) => each.path === parts[0]) ?? PAGES[0];
  return { found, inner: parts[1] ?? null, query: new URLSearchParams(query) };
}

function show() {
  const { found, inner, query } = route();
  const main = byId("main");
  shown?.stop?.();
  wasWaiting = live.isWaiting;
  const make = wasWaiting ? standby : inner !== null && inner !== "" && found.inner ? found.inner : found.page;
  const body = h("div", { class: "page" });
  replace(main, body);
  try {
    shown = make(body, live, { inner, query }) ?? null;
  } catch (error) {
    shown = null;
    replace(body, empty(`This page could not be shown: ${error.message}`));
    throw error;
  }
  tabs(found);
  title(found, inner);
}

function title(found, inner) {
  const name = live.job?.name ?? live.lead?.name;
  document.title = [live.isWaiting ? live.lead.status : inner ? `${found.name} ${inner}` : found.name, name, "cairn"].filter(Boolean).join(" · ");
}

function tabs(found) {
  if (live.isWaiting) return replace(byId("tabs"));
  replace(byId("tabs"), PAGES.filter((each) => (each.isShown ? each.isShown(live) : true)).map((each) =>
    h("a", { href: `#/${each.path}`, class: "tab", "aria-current": each === found ? "page" : null }, each.name)));
  byId("tabs").querySelector("[aria-current]")?.scrollIntoView({ inline: "nearest", block: "nearest" });
}

function around() {
  const { job } = live;
  const now = live.isWaiting ? live.lead : job;
  byId("job-name").textContent = now?.name ?? "";
  const status = byId("status");
  status.textContent = now?.status ?? "";
  status.title = STATUS[now?.status] ?? "";
  status.className = `chip is-${now?.status ?? "unknown"}`;
  byId("logout").hidden = !job?.session;
  link();
  notice();
}

function link() {
  const { newest } = live;
  const how = { live: live.job?.live ? "connected" : "watching", polling: "polling every 3 s", connecting: "connecting", waiting: "waiting" }[live.link];
  const age = live.isWaiting ? "no figures: they are the leader's" : newest ? `epoch ${count(newest.epoch)}, ${span(live.nowMs - newest.wall_ms)} ago` : "no epoch yet";
  replace(byId("link"), h("span", { class: "age" }, age), h("span", { class: `pulse is-${live.link}` }, how));
}

function notice() {
  const box = byId("notice");
  const { job, failed } = live;
  let text = null;
  if (failed) text = failed instanceof ApiError ? `${failed.message} Next: ${failed.next}` : "The server does not answer. This page shows the last known state.";
  else if (job?.status === "failed" && route().found.path !== "") text = `Failed: ${job.health.why ?? job.error}`;
  else if (job?.status === "superseded") text = "Another driver has taken over this job, or a rollback has ended the run. This page shows the previous run.";
  else if (job?.paused) text = `Paused: ${job.paused}`;
  box.hidden = text === null;
  box.textContent = text ?? "";
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try {
    localStorage.setItem("cairn-theme", root.dataset.theme);
  } catch {
    // Storage is off: the choice lasts as long as this page.
  }
}

byId("theme").addEventListener("click", switchTheme);
byId("logout").addEventListener("click", () => logOut().catch((error) => {
  live.failed = error;
  notice();
}));
document.querySelector(".skip").addEventListener("click", (event) => {
  // The fragment of the address names the page, so it cannot name an element.
  event.preventDefault();
  byId("main").focus();
});
window.addEventListener("hashchange", () => {
  show();
  notice();
  window.scrollTo(0, 0);
});
let hadControl = null;
live.addEventListener("change", () => {
  around();
  if (live.isWaiting !== wasWaiting) return show();
  if (live.job && hadControl !== live.job.control) {
    hadControl = live.job.control;
    tabs(route().found);
    title(route().found, route().inner);
  }
  shown?.update?.();
});
live.addEventListener("link", link);
live.addEventListener("tick", () => {
  link();
  shown?.tick?.();
});
await live.start();
show();
