// The cell at a glance: figures, tiers and how full they are, hits, what a time range was like, workers.

import { readAddress, writeAddress } from "./address.js";
import { MOST_ROWS, POOL_WORDS, capacityPanel } from "./capacity.js";
import { chart, roundUp } from "./chart.js";
import { costlyPanel } from "./divergences.js";
import { fill, h, isBeingSelected, legend, panel, table } from "./dom.js";
import { RATES_OVER_MS, flowPanel } from "./flows.js";
import { quantile } from "./history.js";
import { byName, bytes, clockTime, count, duration, percent, plural, sourceWord } from "./words.js";

const HIT_TIERS = ["device", "neighbour", "host", "lent", "disk", "remote"];
const TENANTS_SHOWN = 20;
const SOON_MS = 200;
const GAP_MS = 30 * 1000; // An open page gets a sample each second and keeps one every ten seconds.
const MINUTE_MS = 60 * 1000;
// What may be looked at, as it stands in the address, and the width of a step of the hit ratio in seconds.
const RANGES = { "5m": ["5 minutes", 5 * MINUTE_MS, 5], "15m": ["15 minutes", 15 * MINUTE_MS, 10],
  "1h": ["hour", 60 * MINUTE_MS, 30], "6h": ["6 hours", 360 * MINUTE_MS, 180] };
const USUAL = "15m";

export class Overview {
  #place; #feed; #history; #range = USUAL; #body; #select; #soon = null;

  constructor(place, feed, history) {
    this.#place = place;
    this.#feed = feed;
    this.#history = history;
    this.#select = h("select", { id: "range", onchange: () => { this.#range = this.#select.value; this.#write(); this.draw(); } },
      Object.entries(RANGES).map(([name, [words]]) => h("option", { value: name, text: `the last ${words}` })));
    this.#body = h("div", {});
    fill(place, h("div", { class: "column" }, h("div", { class: "row small" }, h("label", { class: "row" }, "Figures and charts of", this.#select)), this.#body));
    for (const name of ["cell", "slow", "requests"]) feed.addEventListener(name, () => this.#drawSoon());
    feed.addEventListener("link", () => { if (!feed.cell) this.draw(); });
  }

  /** As the address says, which may name a range, or as it was left. */
  show(isFollowed) {
    const asked = readAddress().params.get("range");
    if (isFollowed) this.#range = asked in RANGES ? asked : USUAL;
    this.#select.value = this.#range;
    this.#write();
    this.draw();
  }

  /** What Export JSON saves. */
  data() {
    const [, ms] = RANGES[this.#range];
    const since = this.#feed.nowMs() - ms;
    return { cell: this.#feed.cell, storages: this.#feed.storages, divergences: this.#feed.points, since_ms: since,
      samples: this.#history.samples(since), ttft_ms: this.#history.ttfts(since).map(({ x, y }) => ({ created_ms: x, ttft_ms: y })) };
  }

  #write() {
    if (this.#place.hidden) return;
    writeAddress("overview", "", { range: this.#range === USUAL ? "" : this.#range });
  }

  /** Once for all that comes within a moment. */
  #drawSoon() {
    this.#soon ??= setTimeout(() => { this.#soon = null; this.draw(); }, SOON_MS);
  }

  draw() {
    if (this.#place.hidden || isBeingSelected(this.#body)) return;
    const { cell, storages, storagesError, points, pointsError } = this.#feed;
    if (!cell) {
      fill(this.#body, h("p", { class: "quiet", text: "There is no data from the cell yet." }));
      return;
    }
    fill(this.#body, h("div", { class: "grid" },
      this.#figures(cell), capacityPanel(cell, storages, storagesError), h("div", { class: "column span6" }, hits(cell), moving(cell)), flowPanel(cell, this.#history.rates(RATES_OVER_MS)),
      ...this.#charts(), costlyPanel(points, pointsError), workers(cell), tenants(cell)));
  }

  #figures(cell) {
    const [words, ms] = RANGES[this.#range];
    const since = this.#feed.nowMs() - ms;
    const ttfts = this.#history.ttfts(since).map(({ y }) => y);
    const seen = `of requests of the last ${words} that this page saw`;
    const figure = (value, what, why = "") => h("div", { class: "figure" }, h("b", { text: value }), h("span", { class: "quiet small", text: what, title: why }));
    const saved = cell.savings;
    return h("section", { class: "panel span12", "aria-label": "Figures" }, h("div", { class: "figure-row" },
      figure(count(cell.running), "requests running"),
      figure(count(cell.queued), `waiting, of ${count(cell.max_queued)} at the most`),
      figure(percent(this.#history.hitRatio(since)), "of prompt tokens cached", seen),
      figure(duration(quantile(ttfts, 0.5)), "time to first token, p50", seen),
      figure(duration(quantile(ttfts, 0.95)), "time to first token, p95", seen),
      saved ? figure(count(saved.tokens), "tokens not computed again, since the cell began", `${count(saved.computed_tokens)} were computed`) : null,
      saved ? figure(saved.prefill_seconds ? duration(1000 * saved.prefill_seconds) : "–", `of prefill saved; loads took ${duration(1000 * saved.load_seconds)}`,
        "since the cell began, by the measured speed of each worker; – before any worker has been measured") : null,
      figure(count(cell.nodes), `nodes, ${plural(cell.pins, "pin")}`)));
  }

  #charts() {
    const [, rangeMs, stepS] = RANGES[this.#range];
    const to = this.#feed.nowMs();
    const points = this.#history.ttfts(to - rangeMs);
    const ratios = this.#history.hitRatios(to - rangeMs, 1000 * stepS);
    const samples = this.#history.samples(to - rangeMs);
    // From where there is anything on, and a minute at least.
    const from = Math.min(to - MINUTE_MS, Math.max(to - rangeMs, this.#history.beginMs() ?? to));
    // As wide as its place is, so that the letters of all charts are of one size.
    const width = Math.max(240, this.#place.clientWidth / (matchMedia("(max-width: 1000px)").matches ? 1 : 2) - 44);
    const tell = (list, word) => (list.length ? `${plural(list.length, "value")}, the last is ${word(list.at(-1).y)}` : "nothing yet");
    const drawn = (title, aside, series, most, word, nothing) => panel(title, { className: "span6", aside: h("span", { class: "quiet small" }, aside) },
      series.some((one) => one.points.length)
        ? chart({ title: `${title} over time`, from, to, most, word, width, series, description: series.map((one) => `${one.name}: ${tell(one.points, word)}`).join("; ") })
        : h("p", { class: "quiet", text: nothing }),
      series.length > 1 ? legend(series.map((one) => one.color.slice(2)), (name) => series.find((one) => one.color === `--${name}`).name) : null);
    const none = this.#feed.requestsError || "No request has been seen in this time.";
    const tiers = [...new Set(samples.flatMap(({ occupancy }) => Object.keys(occupancy)))];
    const every = Math.ceil((2 * samples.length) / width) || 1;
    const shown = thinned(samples, every);
    const sampled = (value) => shown.map((one) => ({ x: one.ms, y: value(one) })).filter(({ y }) => y !== undefined);
    const line = (name, points, color, gapMs = every * GAP_MS) => ({ name, points, color, kind: "line", gapMs });
    const [running, waiting] = [sampled((one) => one.running), sampled((one) => one.queued)];
    const busiest = 2 * roundUp([...running, ...waiting].reduce((top, { y }) => Math.max(top, y), 2) / 2);
    const slowest = roundUp(points.reduce((top, { y }) => Math.max(top, y), 1));
    return [
      drawn("Cached share of prompts", `each ${stepS} s`, [line("cached", ratios, "--ink", 3000 * stepS)], 1, percent, none),
      drawn("Time to first token", "a dot is a request", [{ name: "requests", points, color: "--ink", kind: "dots" }], slowest, duration, none),
      drawn("Requests", this.#history.fault || (this.#history.beginMs() ? `remembered since ${clockTime(this.#history.beginMs())}` : ""),
        [line("running", running, "--ink"), line("waiting", waiting, "--queue")], busiest, count, "No sample in this time."),
      drawn("Memory in use", "share of pages that are cached or leased", tiers.map((tier) => line(POOL_WORDS[tier] ?? tier, sampled((one) => one.occupancy[tier]), `--${tier}`)), 1, percent, "No sample in this time."),
    ];
  }
}

/** One sample of so many, the last one among them. */
function thinned(samples, every) {
  return samples.filter((_, place) => (samples.length - 1 - place) % every === 0);
}

function hits(cell) {
  const found = HIT_TIERS.map((tier) => [tier, cell.counters[`hit_tokens_${tier}`] ?? 0]);
  const all = found.reduce((sum, [, tokens]) => sum + tokens, 0);
  return panel("Hit tokens by tier", { aside: h("span", { class: "quiet small", text: "since the cell began" }) },
    h("div", { class: "bar", role: "img", "aria-label": found.map(([tier, tokens]) => `${sourceWord(tier)} ${count(tokens)}`).join(", ") },
      found.map(([tier, tokens]) => h("i", { class: `c-${tier}`, style: { width: `${(100 * tokens) / (all || 1)}%` } }))),
    legend(found.filter(([, tokens]) => tokens).map(([tier]) => tier), (tier) => `${sourceWord(tier)}: ${count(cell.counters[`hit_tokens_${tier}`])}`),
    all ? null : h("p", { class: "quiet", text: "None yet." }));
}

function workers(cell) {
  const all = cell.workers;
  const busiest = [...all].sort((one, other) => other.draining - one.draining || other.running + other.waiting - one.running - one.waiting).slice(0, MOST_ROWS);
  return panel("Workers", { className: "span12", aside: h("span", { class: "quiet small", text: busiest.length < all.length ? `those that leave and the busiest, ${busiest.length} of ${count(all.length)}` : "requests" }) }, all.length
    ? table("Workers", [["worker", false], ["running", true], ["waiting", true], ["state", false]],
      busiest.sort((one, other) => byName(one.worker_id, other.worker_id)).map((worker) => [worker.worker_id, count(worker.running), count(worker.waiting),
        worker.draining ? h("span", { class: "warn", text: "leaving: it gets no new requests" }) : h("span", { class: "good", text: "serving" })]))
    : h("p", { class: "bad", text: "No worker has joined: nothing can be computed." }));
}

function moving(cell) {
  const facts = [["fetches from below host memory", cell.fetches], ["saves to disk", cell.saves], ["requests that wait for another's KV", cell.deferred],
    ["spans being computed", cell.in_flight_nodes], ["pages pinned", cell.pinned_pages], ["pages that callers lease", cell.leased_pages],
    ["pages evicted from devices since the cell began", cell.counters.evicted_pages_device ?? 0], ["pages evicted from host memory since the cell began", cell.counters.evicted_pages_host ?? 0]];
  return panel("Under way", { className: "grows", aside: h("span", { class: "quiet small", text: `scheduler ${cell.scheduler_id}, epoch ${cell.epoch}` }) },
    h("dl", { class: "facts" }, facts.flatMap(([what, number]) => [h("dt", { text: what }), h("dd", { class: "num", text: count(number) })])));
}

// The file's tenants and all other callers, those with most at work first; null without tenants.
function tenants(cell) {
  const all = cell.tenants ?? [];
  if (all.length < 2) return null;
  const weight = ({ running, waiting, device_bytes, host_bytes, disk_bytes }) => [running + waiting, device_bytes + host_bytes + disk_bytes];
  const sorted = [...all].sort((one, other) => weight(other)[0] - weight(one)[0] || weight(other)[1] - weight(one)[1] || one.tenant.localeCompare(other.tenant));
  const shown = sorted.slice(0, TENANTS_SHOWN);
  return panel("Tenants", { className: "span12", aside: h("span", { class: "quiet small", text: shown.length < all.length ? `the busiest ${shown.length} of ${count(all.length)}` : "requests, and cached bytes by tier" }) },
    table("Tenants", [["tenant", false], ["running", true], ["waiting", true], ["device", true], ["host", true], ["disk", true]],
      shown.map((tenant) => [tenant.tenant, count(tenant.running), count(tenant.waiting), bytes(tenant.device_bytes), bytes(tenant.host_bytes), bytes(tenant.disk_bytes)])));
}
