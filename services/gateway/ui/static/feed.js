// The cell as it goes on: one stream of events, made anew whenever it ends; requests and storages asked for now and then. A page in
// the background has no stream: a browser opens six connections to a host, and a seventh page would wait for ever.

import { ApiError, ask, events } from "./api.js";

const SILENT_MS = 8000;
const BEHIND_MS = 5000;
const REQUESTS_MS = 2000;
const SLOWLY_MS = 5000;
const AWAITED_MS = 200; // Until the cell is heard.
const LISTED = 100; // As many as a gateway lists at once,
const PAGES = 11; // and pages of all that it keeps.
const KEPT = 2048;
const RETRY_MS = [1000, 2000, 4000, 8000];

/**
 * Tells its listeners `link`, `cell` (a CellReport), `requests` (explanations, newest first) and `slow` (what is asked for
 * every few seconds: each storage's counters, null where one does not answer, and the costliest divergence points).
 */
export class Feed extends EventTarget {
  link = { state: "connecting", message: "", code: "" };
  cell = null;
  requests = [];
  requestsError = "";
  storages = {};
  storagesError = "";
  points = null;
  pointsError = "";
  #aheadMs = 0; // How far this browser's clock is ahead of the gateway's.
  #abort = null;
  #known = new Map(); // Explanations by request id.

  get isLive() { return this.link.state === "live"; }

  /** Now by the gateway's clock, which requests are dated by; Unix time in ms. */
  nowMs() { return Date.now() - this.#aheadMs; }

  /** Begin, or begin anew with other keys. */
  start() {
    this.#abort?.abort();
    this.#abort = new AbortController();
    const { signal } = this.#abort;
    this.#follow(signal);
    this.#repeat(REQUESTS_MS, () => this.#recent(signal), signal);
    this.#repeat(SLOWLY_MS, () => this.#slowly(signal), signal);
  }

  /** There is no key to begin with. */
  lock(why) { this.#say("locked", why); }

  #say(state, message = "", code = "") {
    this.link = { state, message, code };
    this.dispatchEvent(new Event("link"));
  }

  async #follow(signal) {
    for (let failures = 0; !signal.aborted; failures += 1) {
      const stream = new AbortController();
      const onEnd = () => stream.abort();
      signal.addEventListener("abort", onEnd);
      let isTurned = false;
      const onTurn = () => { isTurned = true; stream.abort(); };
      document.addEventListener("visibilitychange", onTurn);
      let timer;
      try {
        // A stream that says nothing is as good as none: a proxy may hold a connection whose other end is gone.
        const isStream = !document.hidden;
        if (isStream) timer = setTimeout(onEnd, SILENT_MS);
        for await (const event of isStream ? events("/v1/cell/events", { signal: stream.signal }) : asked(stream.signal)) {
          clearTimeout(timer);
          if (isStream) timer = setTimeout(onEnd, SILENT_MS);
          failures = 0;
          if (signal.aborted) return;
          if (event.error) {
            this.#say("away", event.error.message, event.error.code ?? "");
            continue;
          }
          this.cell = event;
          if (event.now_ms) this.#aheadMs = Date.now() - event.now_ms;
          this.#say("live");
          this.dispatchEvent(new Event("cell"));
        }
        if (!signal.aborted && !isTurned) this.#say("gone", "The stream of the gateway ended.");
      } catch (error) {
        if (signal.aborted) return;
        if (isTurned) continue;
        const known = error instanceof ApiError ? error : new ApiError("gone", "The gateway does not send any more.");
        this.#say(known.kind === "refused" ? "gone" : known.kind, known.message, known.code);
        if (known.kind === "locked" || known.kind === "off") return; // Nothing changes before a person does something.
      } finally {
        clearTimeout(timer);
        signal.removeEventListener("abort", onEnd);
        document.removeEventListener("visibilitychange", onTurn);
      }
      if (!isTurned) await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)], signal);
    }
  }

  async #repeat(periodMs, call, signal) {
    while (!signal.aborted) {
      const isDue = this.isLive && !document.hidden;
      if (isDue) await call();
      await pause(isDue ? periodMs : AWAITED_MS, signal);
    }
  }

  /** Page after page, the newest first, until everything on one was known before and is over. */
  async #recent(signal) {
    try {
      let after = "";
      const seen = new Set();
      for (let page = 0; page < PAGES; page += 1) {
        const { data, has_more: more } = await ask(`/v1/requests?limit=${LISTED}${after && `&after=${encodeURIComponent(after)}`}`, { signal });
        const isOld = data.every((one) => isOver(this.#known.get(one.request_id)));
        for (const one of data) {
          this.#known.set(one.request_id, one);
          seen.add(one.request_id);
        }
        if (!more) this.#forgetUnfinished(seen);
        if (!more || isOld) break;
        after = data.at(-1).request_id;
      }
      this.requests = [...this.#known.values()].sort((one, other) => other.created_ms - one.created_ms);
      for (const old of this.requests.splice(KEPT)) this.#known.delete(old.request_id);
      this.requestsError = "";
    } catch (error) {
      if (signal.aborted) return;
      this.requestsError = error.message;
    }
    this.dispatchEvent(new Event("requests"));
  }

  /** What was under way and is listed no more has no end that could be told: its gateway began anew. */
  #forgetUnfinished(seen) {
    for (const [id, one] of this.#known) if (!seen.has(id) && !isOver(one)) this.#known.delete(id);
  }

  async #slowly(signal) {
    const [stats, points] = await Promise.allSettled([ask("/v1/cache/stats", { signal }), ask("/v1/cache/divergences", { signal })]);
    if (signal.aborted) return;
    if (stats.status === "fulfilled") this.storages = stats.value.storages;
    if (points.status === "fulfilled") this.points = points.value;
    this.storagesError = stats.reason?.message ?? "";
    this.pointsError = points.reason?.message ?? "";
    this.dispatchEvent(new Event("slow"));
  }
}

/** The cell, asked for again and again. */
async function* asked(signal) {
  while (!signal.aborted) {
    yield await ask("/v1/cell", { signal });
    await pause(BEHIND_MS, signal);
  }
}

const isOver = (one) => one !== undefined && !["queued", "running"].includes(one.state);

function pause(ms, signal) {
  return new Promise((resolve) => {
    const onEnd = () => { clearTimeout(timer); resolve(); };
    // Taken off again: a page that is open for days pauses a hundred thousand times.
    const timer = setTimeout(() => { signal.removeEventListener("abort", onEnd); resolve(); }, ms);
    signal.addEventListener("abort", onEnd, { once: true });
  });
}
