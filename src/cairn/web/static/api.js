// Requests to this server, and the live list of epochs.

export class ApiError extends Error {
  constructor(status, code, message, next) {
    super(message);
    Object.assign(this, { status, code, next });
  }
}

async function parse(response) {
  // A driver that waits redirects to the leader, which is another site: it has its own page.
  if (response.type === "opaqueredirect") throw new ApiError(307, "standby", "Another driver leads the job.", "open the dashboard of the leader");
  let body = null;
  try {
    body = await response.json();
  } catch {
    // Not JSON: the status is all there is.
  }
  if (response.ok && body !== null) return body;
  if (response.redirected && response.url.includes("/login")) location.assign("/login");
  const error = body?.error ?? { code: "error", message: `The server answered with status ${response.status}`, next: "try again" };
  if (response.status === 401 && !response.url.includes("/api/control/")) location.assign("/login");
  throw new ApiError(response.status, error.code, error.message, error.next);
}

export async function get(path) {
  return parse(await fetch(path, { headers: { Accept: "application/json" }, redirect: "manual" }));
}

export async function post(path, body, token = null) {
  const headers = { "Content-Type": "application/json", Accept: "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  return parse(await fetch(path, { method: "POST", headers, body: JSON.stringify(body), redirect: "manual" }));
}

// With fetch, not with a form: under our referrer policy a form has no origin.
export async function logOut() {
  const response = await fetch("/logout", { method: "POST" });
  // 401: the session had already expired.
  if (!response.redirected && response.status !== 401) await parse(response);
  location.assign("/login");
}

const EPOCHS_FIRST = 300;
const EPOCHS_MORE = 5;
const EPOCHS_MAX = 1000;
const POLL_MS = 3000;

// The job and its epochs, kept up to date by events, or by polling without events.
export class Live extends EventTarget {
  job = null;
  // The drivers of the job: who leads, who waits, and whether this one does.
  lead = null;
  // Epochs before this one are retired: their figures are known, their state is gone.
  oldestKept = 0;
  link = "connecting";
  #epochs = new Map();
  #busy = null;
  #again = false;
  #source = null;
  #poll = null;
  #hasBegun = false;

  // Oldest first.
  get epochs() {
    return [...this.#epochs.values()].sort((a, b) => a.epoch - b.epoch);
  }

  // The driver of this server waits for the lead: it has no figures of the job.
  get isWaiting() {
    return this.lead?.waiting === true;
  }

  get newest() {
    return this.job?.epoch ?? null;
  }

  // The health of the job now: status, rates and failure.
  get health() {
    return this.job?.health ?? null;
  }

  // The time from the watermark to now; it grows while no rows arrive.
  get lagMs() {
    const mark = this.newest?.watermark_ms ?? null;
    return mark === null ? null : Math.max(0, this.nowMs - mark);
  }

  // Milliseconds since 1970 by the server's clock, so ages do not depend on the browser's.
  get nowMs() {
    return this.job === null ? Date.now() : Date.now() + this.#skewMs;
  }
  #skewMs = 0;

  async start() {
    await this.refresh();
    this.#hasBegun = true;
    this.#listen();
    setInterval(() => this.dispatchEvent(new Event("tick")), 1000);
    // Rates and the status change without a new epoch.
    setInterval(() => {
      if (!document.hidden && this.#poll === null) this.refresh();
    }, POLL_MS);
  }

  // One request at a time; calls in between cause one more request afterwards.
  refresh() {
    if (this.#busy !== null) {
      this.#again = true;
      return this.#busy;
    }
    this.#busy = this.#fetch().finally(() => {
      this.#busy = null;
      if (this.#again) {
        this.#again = false;
        this.refresh();
      }
    });
    return this.#busy;
  }

  async #fetch() {
    try {
      this.lead = await get("/api/leader");
      if (this.isWaiting) {
        this.job = null;
        this.failed = null;
        this.#deafen();
        this.dispatchEvent(new Event("change"));
        return;
      }
      const [job, { epochs, oldest_kept: oldestKept }] = await Promise.all([
        get("/api/job"),
        get(`/api/epochs?limit=${this.#epochs.size ? EPOCHS_MORE : EPOCHS_FIRST}`),
      ]);
      this.#skewMs = job.now_ms - Date.now();
      const oldest = epochs.at(-1);
      const isGap = this.#epochs.size && oldest && oldest.parent !== null && !this.#epochs.has(oldest.epoch) && !this.#epochs.has(oldest.parent);
      this.job = job;
      this.oldestKept = oldestKept;
      this.#merge(isGap ? (await get(`/api/epochs?limit=${EPOCHS_FIRST}`)).epochs : epochs);
      this.failed = null;
      if (this.#hasBegun && this.#source === null) this.#listen();
    } catch (error) {
      this.failed = error;
    }
    this.dispatchEvent(new Event("change"));
  }

  #merge(epochs) {
    const newest = epochs[0]?.epoch ?? 0;
    // Epochs between an epoch and its parent were rolled back.
    for (const number of [...this.#epochs.keys()])
      if (number > newest || epochs.some((each) => number < each.epoch && each.parent !== null && number > each.parent)) this.#epochs.delete(number);
    for (const each of epochs) this.#epochs.set(each.epoch, each);
    const numbers = [...this.#epochs.keys()].sort((a, b) => a - b);
    for (const number of numbers.slice(0, Math.max(0, numbers.length - EPOCHS_MAX))) this.#epochs.delete(number);
  }

  // Events are the leader's.
  #deafen() {
    this.#source?.close();
    this.#source = null;
    this.#linked("waiting");
  }

  #listen() {
    if (this.isWaiting) return;
    const source = (this.#source = new EventSource("/api/events"));
    source.addEventListener("epoch", () => this.refresh());
    source.addEventListener("status", () => this.refresh());
    source.addEventListener("open", () => this.#linked("live"));
    source.addEventListener("error", () => {
      this.#linked("polling");
      // The browser reconnects by itself, unless the server refused.
      if (source.readyState === EventSource.CLOSED && source === this.#source) setTimeout(() => this.#listen(), 10000);
    });
  }

  #linked(link) {
    this.link = link;
    if (link !== "polling") {
      clearInterval(this.#poll);
      this.#poll = null;
    } else if (this.#poll === null) {
      this.#poll = setInterval(() => this.refresh(), POLL_MS);
    }
    this.dispatchEvent(new Event("link"));
  }
}
