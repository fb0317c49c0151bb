// KV between the tiers as it moves: what goes down, what comes up, in tokens a second.

import { h, panel } from "./dom.js";
import { count, rate } from "./words.js";

export const RATES_OVER_MS = 15000;

const TIERS = [["device", "device memory"], ["host", "host memory"], ["disk", "disk"], ["remote", "object store"]];
const DOWN = { "device>host": "copied", "host>disk": "saved", "disk>remote": "uploaded" };
// From an object store KV comes to host memory, past the disk.
const UP = { "host>device": "loaded", "disk>host": "fetched", "remote>host": "to host memory" };
const WAYS = [["device>host", "host>device"], ["host>disk", "disk>host"], ["disk>remote", "remote>host"]];

/** A panel of the tiers below one another with the ways between them; `rates` are tokens a second by "source>target". */
export function flowPanel(cell, rates) {
  const totals = Object.fromEntries((cell.flows ?? []).map(({ source, target, tokens }) => [`${source}>${target}`, tokens]));
  const way = (name, arrow, what) => {
    const perSecond = rates[name] ?? 0;
    return h("li", { class: `way ${perSecond ? "" : "idle"}`, title: totals[name] === undefined ? null : `${count(totals[name])} tokens since the cell began` },
      h("span", { class: "arrow", "aria-hidden": "true", text: arrow, style: { "font-size": `${1 + Math.min(1.2, Math.log10(1 + perSecond) / 4)}rem` } }),
      h("b", { text: rate(perSecond) }), h("span", { class: "quiet", text: ` tokens/s ${what}` }));
  };
  const tier = ([name, words]) => h("div", { class: `tier t-${name}`, text: words });
  return panel("Flow between tiers", { className: "span6", id: "flows", aside: h("span", { class: "quiet small", text: `tokens of KV a second, over ${RATES_OVER_MS / 1000} s` }) },
    h("div", { class: "flows" },
      h("ul", { class: "ways" }, way("computed>device", "↓", "computed"), rates["lent>host"] ? way("lent>host", "→", "read from other nodes into host memory") : null),
      TIERS.flatMap((one, place) => [tier(one), WAYS[place] ? h("ul", { class: "ways" }, way(WAYS[place][0], "↓", DOWN[WAYS[place][0]]), way(WAYS[place][1], "↑", UP[WAYS[place][1]])) : null])));
}
