// Calls of the gateway. Every failure is an ApiError with a `kind` that says what a person can do about it.

import { keep, kept } from "./kept.js";

export const keys = {
  get admin() { return kept("sessionStorage", "thermocline.admin"); },
  get api() { return kept("sessionStorage", "thermocline.api"); },
  /** Kept for this tab alone, until it closes. */
  set(admin, api) {
    keep("sessionStorage", "thermocline.admin", admin);
    keep("sessionStorage", "thermocline.api", api);
  },
};

const WAIT_MS = 20000;
const MOST_EVENT_CHARS = 2 ** 24;
// A file of this page lies in ui/, the API beside it, also behind a proxy that adds a path.
const address = (path) => new URL(`..${path}`, document.baseURI);

export class ApiError extends Error {
  /** `kind`: gone (no answer), locked (401), off (403), busy (429), away (503), refused (anything else). */
  constructor(kind, message, code = "") {
    super(message);
    this.kind = kind;
    this.code = code;
  }
}

function headersFor(path, body) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (keys.admin && /^\/v1\/(cache|cell|requests)/.test(path)) headers["x-admin-key"] = keys.admin;
  if (keys.api && !/^\/v1\/(cache|cell)/.test(path)) headers.authorization = `Bearer ${keys.api}`;
  return headers;
}

function headerSafe() {
  // Anything else cannot stand in a header; the browser's own words about it say nothing.
  for (const key of [keys.admin, keys.api]) {
    if (/[^\x21-\x7e]/.test(key)) throw new ApiError("locked", "A key consists of printable ASCII characters without blanks.");
  }
}

async function send(path, { method = "GET", body, signal } = {}) {
  headerSafe();
  let response;
  try {
    response = await fetch(address(path), {
      method, signal, headers: headersFor(path, body), cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (signal?.aborted && signal.reason?.name !== "TimeoutError") throw error;
    throw new ApiError("gone", "The gateway cannot be reached.");
  }
  if (response.ok) return response;
  let told = {};
  try { told = (await response.json()).error ?? {}; } catch { /* A proxy's page; its status says enough. */ }
  const kind = { 401: "locked", 403: "off", 429: "busy", 503: "away" }[response.status] ?? "refused";
  throw new ApiError(kind, told.message ?? `The gateway answers ${response.status}.`, told.code ?? "");
}

/** The JSON answer. */
export async function ask(path, { method, body, signal, waitMs = WAIT_MS } = {}) {
  const limit = AbortSignal.timeout(waitMs);
  const response = await send(path, { method, body, signal: signal ? AbortSignal.any([signal, limit]) : limit });
  try {
    return await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("gone", "The answer of the gateway broke off.");
  }
}

/** Server-sent events as parsed JSON, until `[DONE]` or the end. `signal` ends it early. */
export async function* events(path, { method, body, signal } = {}) {
  const response = await send(path, { method, body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new ApiError("gone", "The stream of the gateway broke off.");
      }
      if (part.done) return;
      rest += part.value;
      if (rest.length > MOST_EVENT_CHARS) throw new ApiError("refused", "An event of the gateway is too long.");
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        const data = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        rest = rest.slice(end + 2);
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
