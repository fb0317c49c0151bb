// The cell as it goes on: one stream of events, made anew whenever it ends, and recent requests asked for now and then.

import { ApiError, ask, events } from "./api.js";

const SILENT_MS = 8000;
const REQUESTS_MS = 2000;
const AWAITED_MS = 200; // Until the cell is heard.
const RECENT = 100; // As many as a gateway lists at once.
const RETRY_MS = [1000, 2000, 4000, 8000];

/** Tells its listeners `link` (state, message), `cell` (a CellReport) and `requests` (explanations, newest first). */
export class Feed extends EventTarget {
  state = "connecting";
  cell = null;
  requests = [];
  requestsError = "";
  #abort = null;

  /** Begin, or begin anew with other keys. */
  start() {
    this.#abort?.abort();
    this.#abort = new AbortController();
    this.#follow(this.#abort.signal);
    this.#recent(this.#abort.signal);
  }

  #say(state, message = "") {
    this.state = state;
    this.dispatchEvent(new CustomEvent("link", { detail: { state, message } }));
  }

  async #follow(signal) {
    for (let failures = 0; !signal.aborted; failures += 1) {
      // A stream that says nothing is as good as none: a proxy may hold a connection whose other end is gone.
      const stream = new AbortController();
      const onEnd = () => stream.abort();
      signal.addEventListener("abort", onEnd);
      let timer = setTimeout(() => stream.abort(), SILENT_MS);
      try {
        for await (const event of events("/v1/cell/events", { signal: stream.signal })) {
          clearTimeout(timer);
          timer = setTimeout(() => stream.abort(), SILENT_MS);
          failures = 0;
          if (signal.aborted) return;
          if (event.error) {
            this.#say("away", event.error.message);
            continue;
          }
          this.cell = event;
          this.#say("live");
          this.dispatchEvent(new Event("cell"));
        }
        if (!signal.aborted) this.#say("gone", "The stream of the gateway ended.");
      } catch (error) {
        if (signal.aborted) return;
        const known = error instanceof ApiError ? error : new ApiError("gone", "The gateway says nothing any more.");
        this.#say(known.kind === "refused" ? "gone" : known.kind, known.message);
        if (known.kind === "locked" || known.kind === "off") return; // Nothing changes before a person does something.
      } finally {
        clearTimeout(timer);
        signal.removeEventListener("abort", onEnd);
      }
      await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)], signal);
    }
  }

  async #recent(signal) {
    while (!signal.aborted) {
      if (this.state === "live" && !document.hidden) {
        try {
          const found = (await ask(`/v1/requests?limit=${RECENT}`, { signal })).data;
          this.requests = [...found].sort((one, other) => other.created_ms - one.created_ms);
          this.requestsError = "";
        } catch (error) {
          if (signal.aborted) return;
          this.requestsError = error.message;
        }
        this.dispatchEvent(new Event("requests"));
      }
      await pause(this.state === "live" ? REQUESTS_MS : AWAITED_MS, signal);
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
