// Numbers and the API's names as people read them. Pure.

export const SOURCES = ["device", "neighbour", "host", "lent", "disk", "remote", "hidden", "sparse", "computed"];
export const PARTS = ["accept", "broker", "queue", "deferral", "prefetch_wait", "load", "restore", "compute", "deliver"];

const SOURCE_WORDS = {
  device: "device memory", neighbour: "another device", host: "host memory", lent: "another node", disk: "disk", remote: "object store",
  hidden: "restored from hidden states", sparse: "disk, only important tokens", computed: "computed",
};
const PART_WORDS = {
  accept: "accepting", broker: "broker", queue: "waiting in line", deferral: "waiting for another request",
  prefetch_wait: "waiting for a fetch", load: "loading", restore: "restoring", compute: "computing", deliver: "delivering",
};
const REASON_WORDS = {
  never_stored: "was never stored", evicted: "was evicted", not_admitted: "was not admitted to a lower tier",
  pending: "is being computed or fetched by another", other_salt: "is cached under another salt",
  other_fidelity: "is cached at another fidelity", deadline: "would have come too late", partial_chunk: "is the tail of a chunk",
  last_token: "the last token is always computed", opted_out: "the request reads no cache", failed: "failed its check",
  elsewhere: "is on a device that the worker does not reach", too_little: "is too little to be worth a load",
  unknown: "is not known",
};
export const REASONS = Object.keys(REASON_WORDS);

// The name of each usual cause, and what to do about it.
const CAUSES = {
  whitespace: ["Spaces or line breaks", "Write the same text the same way each time."],
  tools_reordered: ["The same tools in another order", "Keep their order, for instance by name."],
  tools_changed: ["Other tools, or other descriptions", "Tools stand early in a prompt: everything behind a changed one is computed again."],
  date_or_time: ["A date or time", "Put it behind the shared part, in the last message, or round it."],
  identifier: ["An identifier", "Put ids of requests, sessions and users behind the shared part."],
  number: ["A number", "Put counters behind the shared part."],
  template_variable: ["A variable of the chat template", "Requests with another value share only the text before it."],
  system_prompt: ["An edited system prompt", "Prompts with the old and the new text share only the text before the edit."],
  answer_changed: ["An answer came back changed", "Send answers back as they were generated; templates may leave out their reasoning."],
  tool_result: ["Another result of a tool", "Nothing is wrong where the tool gave another answer."],
  other_conversation: ["Another conversation", "Nothing is wrong: conversations share only the text before the first question."],
  other_turn: ["Another question in one conversation", "Nothing is wrong where it was edited or asked twice."],
  unknown: ["Not known", "Compare both texts."],
};
export const causeWord = (name) => CAUSES[name]?.[0] ?? name;
export const causeAdvice = (name) => CAUSES[name]?.[1] ?? "";

export const sourceWord = (name) => SOURCE_WORDS[name] ?? name;
export const partWord = (name) => PART_WORDS[name] ?? name;
export const reasonWord = (name) => REASON_WORDS[name] ?? name;

export const count = (number) => (number === null || number === undefined ? "–" : Math.round(number).toLocaleString("en"));
export const percent = (share) => (share === null || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`);
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** Tokens a second, or another rate, in three digits or so. */
export const rate = (perSecond) => (perSecond >= 9.5 || perSecond === 0 ? count(perSecond) : perSecond.toFixed(1));

/** Milliseconds with three digits or so. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 36e5) return `${(ms / 36e5).toFixed(1)} h`;
  if (ms >= 60000) return `${(ms / 60000).toFixed(1)} min`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return ms >= 100 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

export function bytes(amount) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (amount >= 1024 && unit < units.length - 1) { amount /= 1024; unit += 1; }
  return `${unit ? amount.toFixed(1) : amount} ${units[unit]}`;
}

/** Text whose characters that are invisible, or turn the order of others round, stand as escapes: U+202E as \u202e. */
export const visible = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g,
  (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);

export const clockTime = (ms) => new Date(ms).toLocaleTimeString("en-GB");
/** A moment that may be days ago: with its date, unless that is today's. */
export const moment = (ms, nowMs = Date.now()) => (new Date(ms).toDateString() === new Date(nowMs).toDateString() ? clockTime(ms) : new Date(ms).toLocaleString("en-GB"));
/** The order of names with numbers in them: worker-2 stands before worker-10. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;

/** Tokens of an explained prompt by source; null where the prompt's parts are not told. */
export function tokensBySource(explained) {
  if (!Array.isArray(explained.prompt)) return null;
  const found = {};
  for (const { start, end, source } of explained.prompt) found[source] = (found[source] ?? 0) + end - start;
  return found;
}

/** The share of an explained prompt that was not computed; null where it is not known. */
export function hitShare(explained) {
  const found = tokensBySource(explained);
  const all = found && Object.values(found).reduce((sum, tokens) => sum + tokens, 0);
  return all ? 1 - (found.computed ?? 0) / all : null;
}
