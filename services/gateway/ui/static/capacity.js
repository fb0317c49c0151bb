// How full everything is that keeps KV: pools, disks and object stores, each as a bar.

import { h, panel } from "./dom.js";
import { byName, bytes, count, percent, plural } from "./words.js";

export const POOL_WORDS = { device: "device memory", host: "host memory", hidden: "host memory for hidden states" };
const POOL_ORDER = { device: 0, host: 1, hidden: 2 };
export const MOST_ROWS = 40; // All of a panel is drawn anew each second.

/** A panel with a bar for each pool, disk and object store; `error` says why disks and stores cannot be told. */
export function capacityPanel(cell, storages, error) {
  const names = Object.keys(storages).sort(byName);
  const all = [...[...cell.pools].sort((one, other) => (POOL_ORDER[one.tier] ?? 9) - (POOL_ORDER[other.tier] ?? 9) || byName(one.owner, other.owner)).map(poolRow),
    ...names.map((name) => diskRow(name, storages[name], faultsOf(cell, name, ["disk", "quota"]))),
    ...names.map((name) => storeRow(name, storages[name], faultsOf(cell, name, ["remote"])))].filter(Boolean);
  const first = new Set([...all].sort((one, other) => urgency(other) - urgency(one)).slice(0, MOST_ROWS));
  return panel("Memory, disks and object stores", { className: "span12", id: "capacity",
    aside: h("span", { class: "quiet small", text: `pages of ${cell.page_size} tokens, chunks of ${cell.chunk_tokens}` }) },
  all.length ? null : h("p", { class: "quiet", text: "No worker and no storage has joined." }),
  ...all.filter((one) => first.has(one)).map(row),
  all.length > first.size ? h("p", { class: "quiet small", text: `${count(first.size)} of ${count(all.length)}: those with a fault, and the fullest. Export JSON has all of them.` }) : null,
  error ? h("p", { class: "bad", text: error }) : null,
  h("ul", { class: "legend" },
    h("li", {}, ...["device", "host", "disk", "remote"].map((tier) => h("span", { class: `swatch c-${tier}` })), "cached there"),
    h("li", {}, h("span", { class: "bar swatch" }, h("i", { class: "leased", style: { width: "100%" } })), "in use by requests and transfers"),
    h("li", {}, h("span", { class: "swatch" }), "free, or still to come")));
}

const faultsOf = (cell, name, what) => (cell.degraded ?? []).filter((one) => one.component === name && what.includes(one.what)).map(({ reason }) => reason);

/** What is to be seen before others: faults, then what is full. The bar of an object store says nothing of that. */
const urgency = ({ tier, parts, whole, faults = [], isSilent = false }) => (faults.length || isSilent ? 2 : tier === "remote" ? 0 : sum(parts) / (whole || 1));

const sum = (parts) => parts.reduce((total, [, amount]) => total + amount, 0);

/** One bar: `parts` are [class, amount] of `whole`; `words` tell all of it, `short` stands beside the bar. */
function row({ owner, tier, kind, parts, whole, words, short, faults = [] }) {
  return h("div", { class: "pool" },
    h("div", {}, h("div", { class: "clip", text: owner, title: owner }), h("div", { class: "quiet small", text: kind })),
    h("div", { class: "bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": whole, "aria-valuenow": sum(parts), "aria-valuetext": words,
      "aria-label": `${owner}, ${tier}`, title: words },
    parts.map(([name, amount]) => h("i", { class: name, style: { width: `${(100 * amount) / (whole || 1)}%` } }))),
    h("div", { class: "num small" }, short),
    faults.length ? h("div", { class: "pool-fault small warn", text: faults.join("; ") }) : null);
}

function poolRow({ owner, tier, form, total, cached, leased, free }) {
  return {
    owner, tier, kind: `${POOL_WORDS[tier] ?? tier} ${form ?? ""}`.trim(), whole: total, parts: [[`c-${tier}`, cached], ["leased", leased]],
    words: `${count(cached)} cached, ${count(leased)} in use, ${count(free)} free of ${count(total)} pages`,
    short: [h("b", { text: percent(total ? (total - free) / total : 0) }), h("span", { class: "quiet", text: ` of ${plural(total, "page")}` })],
  };
}

function diskRow(name, counters, faults) {
  if (counters === null) return { owner: name, tier: "disk", kind: "disk", parts: [], whole: 1, words: "does not answer", isSilent: true, short: h("span", { class: "bad", text: "does not answer" }) };
  if (counters.disk_quota_bytes === undefined) return faults.length ? { owner: name, tier: "disk", kind: "disk", parts: [], whole: 1, words: "not in use", short: h("span", { class: "warn", text: "not in use" }), faults } : null;
  const { disk_bytes: held = 0, disk_quota_bytes: quota, disk_chunks: chunks = 0, chunks_quarantined: bad = 0 } = counters;
  const words = `${bytes(held)} of ${bytes(quota)}, ${plural(chunks, "chunk")}${bad ? `, ${count(bad)} quarantined` : ""}`;
  return {
    owner: name, tier: "disk", kind: `disk, ${plural(chunks, "chunk")}`, whole: quota, parts: [["c-disk", Math.min(held, quota)]], words,
    short: [h("b", { text: percent(quota ? held / quota : 0) }), h("span", { class: "quiet", text: ` of ${bytes(quota)}` })],
    faults: [...faults, ...(bad ? [`${plural(bad, "chunk")} quarantined: a checksum or an identity was wrong`] : [])],
  };
}

/** An object store has no bound that could be filled: its bar is the share of chunks that have arrived there. */
function storeRow(name, counters, faults) {
  if (counters?.chunks_uploaded === undefined) return faults.length ? { owner: name, tier: "remote", kind: "object store", parts: [], whole: 1, words: "not in use", short: h("span", { class: "warn", text: "not in use" }), faults } : null;
  const { chunks_uploaded: up, uploads_outstanding: waiting = 0, uploads_failed: failed = 0 } = counters;
  return {
    owner: name, tier: "remote", kind: "object store", whole: up + waiting + failed, parts: [["c-remote", up]],
    words: `${plural(up, "chunk")} uploaded, ${count(waiting)} waiting, ${count(failed)} failed since this storage started`,
    short: [h("b", { text: count(up) }), h("span", { class: "quiet", text: ` ${up === 1 ? "chunk" : "chunks"} up, ${count(waiting)} waiting` })],
    faults: [...faults, ...(failed ? [`${plural(failed, "upload")} failed`] : [])],
  };
}
