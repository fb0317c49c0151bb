// Where a prompt leaves the nearest cached path: for one request in words and text, for the cell as a table.

import { h, panel } from "./dom.js";
import { wordDiff } from "./text_diff.js";
import { causeAdvice, causeWord, count, duration, moment, plural, visible } from "./words.js";

const PART_WORDS = { tools: "the list of tools", template: "text of the chat template", generation_prompt: "the end of the chat template" };

/** Why a request missed, or that it lost nothing; null where it is not told. */
export function divergenceView(explained) {
  const found = explained.divergence;
  if (!found) return null;
  return h("div", { class: "column", id: "divergence" },
    h("h3", { text: "Where it left the cache" }),
    h("p", { text: sentence(found) }),
    found.prompt === null ? null : sides(found),
    found.cause ? h("p", {}, h("b", { text: `${causeWord(found.cause)}. ` }), causeAdvice(found.cause)) : null,
    found.kind === "diverged" && found.cached === null
      ? h("p", { class: "quiet small", text: "The cached text there may be another caller's: it is shown only with the admin key." }) : null);
}

function sentence(found) {
  const lost = found.lost_tokens ? `${plural(found.lost_tokens, "token")}${found.lost_ms ? `, about ${duration(found.lost_ms)},` : ""}` : "";
  switch (found.kind) {
    case "opted_out": return "It reads no cache.";
    case "new": return "No cached prefix begins like it.";
    case "continued": return `Nothing was lost: it goes on where the cached path ends, at token ${count(found.token)}.`;
    case "evicted": return `From token ${count(found.token)} on${place(found)} ${lost} had been cached, and were evicted before it came.`;
  }
  const cost = found.lost_tokens === null ? "" : lost ? ` ${lost} behind it were computed although they are cached there, too.` : " Nothing behind it is cached there, so nothing was lost.";
  return `At token ${count(found.token)}${place(found)} it leaves the nearest cached path.${cost}`;
}

function place({ part, message, role }) {
  if (part === "message") return `, in message ${message} (${role}),`;
  if (!part) return "";
  return `, in ${PART_WORDS[part] ?? part}${message === null ? "" : ` before message ${message} (${role})`},`;
}

/** Both sides below one another: what both begin with in grey, and behind it the words that differ marked. */
function sides({ before, prompt, cached }) {
  const [mine, theirs] = cached === null ? [[{ text: prompt, isCommon: false }], []] : wordDiff(prompt, cached);
  const line = (name, text, parts) => [h("dt", { text: name }),
    h("dd", { class: "mono" }, h("span", { class: "quiet", text: before ? `…${visible(before)}` : "" }),
      text ? parts.map((part) => (part.isCommon ? visible(part.text) : h("mark", { text: visible(part.text) }))) : h("mark", { text: "(its end)" }))];
  return h("dl", { class: "sides" }, line("prompt", prompt, mine), cached === null ? null : line("cached", cached, theirs));
}

/** A panel of the points that cost the cell most; `error` says why they cannot be told. */
export function costlyPanel(points, error) {
  if (!points && !error) return null;
  const rows = (points?.data ?? []).map((one) => h("tr", {},
    h("td", {}, one.cause ? causeWord(one.cause) : "–", h("div", { class: "quiet small", text: `token ${count(one.token)}` })),
    h("td", { style: { width: "60%" } }, one.prompt === null ? "–" : sides(one)),
    h("td", { class: "num", title: one.error_tokens ? `up to ${count(one.error_tokens)} too many` : null, text: count(one.lost_tokens) }),
    h("td", { class: "num", text: duration(one.lost_ms) }),
    h("td", { class: "num", text: count(one.requests) })));
  const columns = [["usual cause", false], ["what differs, in the latest request", false], ["tokens lost", true], ["time lost", true], ["requests", true]];
  return panel("Where prompts leave the cache", { className: "span12", id: "divergences",
    aside: h("span", { class: "quiet small", text: points?.since_ms ? `the costliest, since ${moment(points.since_ms)}` : "the costliest" }) },
  error ? h("p", { class: "bad", text: error })
    : rows.length ? h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "only-read", text: "Divergence points" }),
      h("thead", {}, h("tr", {}, columns.map(([name, isNumber]) => h("th", { scope: "col", class: isNumber ? "num" : null, text: name })))), h("tbody", {}, rows)))
      : h("p", { class: "quiet", text: "No prompt has lost cached tokens to a divergence so far." }));
}
