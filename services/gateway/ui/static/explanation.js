// One explained request: the parts of its time to first token, where it left the cache, and where each part of its prompt came from.

import { divergenceView } from "./divergences.js";
import { h, legend, table } from "./dom.js";
import { PARTS, SOURCES, count, duration, partWord, percent, reasonWord, sourceWord, tokensBySource } from "./words.js";

/** A bar of the parts of the TTFT; `scaleMs` fill it. */
export function partsBar(explained, scaleMs) {
  const parts = explained.parts ?? [];
  const words = parts.filter((part) => part.ms > 0).map((part) => `${partWord(part.name)} ${duration(part.ms)}`).join(", ");
  return h("div", { class: "bar strip", role: "img", "aria-label": words || "no parts yet", title: words },
    parts.map((part) => h("i", { class: `c-${part.name}`, style: { width: `${(100 * Math.max(0, part.ms)) / (scaleMs || 1)}%` } })));
}

/** A bar of the prompt from its first token to its last. */
export function promptBar(explained, className = "") {
  const spans = explained.prompt ?? [];
  const all = spans.reduce((sum, span) => sum + span.end - span.start, 0) || 1;
  const found = tokensBySource(explained) ?? {};
  const words = SOURCES.filter((source) => found[source]).map((source) => `${sourceWord(source)} ${count(found[source])}`).join(", ");
  return h("div", { class: `bar strip ${className}`, role: "img", "aria-label": `tokens of the prompt: ${words || "not told"}`, title: words },
    spans.map((span) => h("i", { class: `c-${span.source}`, style: { width: `${(100 * (span.end - span.start)) / all}%` } })));
}

/** Everything that is known of one request; `hasBar`: its prompt's bar is already shown above. */
export function explanationView(explained, { hasBar = false } = {}) {
  const spans = explained.prompt ?? [];
  const found = tokensBySource(explained) ?? {};
  const all = Object.values(found).reduce((sum, tokens) => sum + tokens, 0);
  const sources = SOURCES.filter((source) => found[source]);
  return h("div", { class: "column" },
    h("h3", { text: `Time to the first token: ${duration(explained.ttft_ms)}` }),
    waterfall(explained),
    divergenceView(explained),
    h("h3", { text: "Where the prompt came from" }),
    spans.length ? (hasBar ? null : promptBar(explained)) : h("p", { class: "quiet", text: "Not told yet: the first token has not come." }),
    legend(sources, (source) => `${sourceWord(source)}: ${count(found[source])} tokens, ${percent(found[source] / all)}`),
    spans.length ? table("Parts of the prompt", [["tokens", false], ["length", true], ["from", false], ["why", false]],
      spans.map((span) => [`${count(span.start)} – ${count(span.end)}`, count(span.end - span.start), sourceWord(span.source),
        whyOf(span)])) : null);
}

/** Why a part was computed. A detail that begins with the reason's own word says it all. */
function whyOf({ reason, detail }) {
  if (!reason) return detail ?? "";
  if (!detail) return reasonWord(reason);
  return detail.startsWith(reason.replaceAll("_", " ")) ? detail : `${reasonWord(reason)}: ${detail}`;
}

function waterfall(explained) {
  const parts = [...(explained.parts ?? [])].sort((one, other) => one.start_ms - other.start_ms || PARTS.indexOf(one.name) - PARTS.indexOf(other.name));
  const whole = Math.max(explained.ttft_ms ?? 0, ...parts.map((part) => part.start_ms + part.ms)) || 1;
  return h("div", { class: "fall", role: "list", "aria-label": "Parts of the time to the first token" }, parts.flatMap((part) => [
    h("span", { role: "listitem", text: partWord(part.name), "aria-label": `${partWord(part.name)}: ${duration(part.ms)} from ${duration(part.start_ms)}` }),
    h("span", { class: "track", "aria-hidden": "true" }, h("i", { class: `c-${part.name}`,
      style: { left: `${(100 * part.start_ms) / whole}%`, width: `${(100 * part.ms) / whole}%` } })),
    h("span", { class: "num", "aria-hidden": "true", text: duration(part.ms) }),
  ]));
}
