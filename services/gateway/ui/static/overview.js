// The cell at a glance: figures, tiers and how full they are, hits, what the past minutes were like, workers.

import { ask } from "./api.js";
import { chart, roundUp } from "./chart.js";
import { costlyPanel } from "./divergences.js";
import { fill, h, legend, panel, table } from "./dom.js";
import { quantile } from "./history.js";
import { bytes, count, duration, percent, plural, sourceWord } from "./words.js";

const WINDOW_MS = 15 * 60 * 1000;
const SLOWLY_MS = 5000;
const HIT_TIERS = ["device", "neighbour", "host", "lent", "disk", "remote"];
const TIER_ORDER = { device: 0, host: 1, hidden: 2 };
const TENANTS_SHOWN = 20;

export class Overview {
  #place; #feed; #history; #storages = {}; #storagesError = ""; #slowlyAt = -SLOWLY_MS; #asking = false; #points = null; #pointsError = "";

  constructor(place, feed, history) {
    this.#place = place;
    this.#feed = feed;
    this.#history = history;
    feed.addEventListener("cell", () => this.draw());
    feed.addEventListener("link", () => { if (!feed.cell) this.draw(); });
  }

  show() { this.draw(); }

  draw() {
    if (this.#place.hidden) return;
    const cell = this.#feed.cell;
    if (!cell) {
      fill(this.#place, h("p", { class: "quiet", text: "Nothing has been heard of the cell yet." }));
      return;
    }
    this.#askSlowly();
    fill(this.#place, h("div", { class: "grid" },
      this.#figures(cell), tiers(cell), hits(cell), this.#disks(cell), ...this.#charts(), costlyPanel(this.#points, this.#pointsError), workers(cell), moving(cell), tenants(cell)));
  }

  #figures(cell) {
    const since = Date.now() - WINDOW_MS;
    const ttfts = this.#history.ttfts(since).map(({ y }) => y);
    const figure = (value, what, why = "") => h("div", { class: "figure" }, h("b", { text: value }), h("span", { class: "quiet small", text: what, title: why }));
    return h("section", { class: "panel span12", "aria-label": "Figures" }, h("div", { class: "figure-row" },
      figure(count(cell.running), "requests running"),
      figure(count(cell.queued), `waiting, of ${count(cell.max_queued)} at the most`),
      figure(percent(this.#history.hitRatio(since)), "of prompt tokens cached", "of requests of the last 15 minutes that this page saw"),
      figure(duration(quantile(ttfts, 0.5)), "time to first token, median", "of requests of the last 15 minutes that this page saw"),
      figure(duration(quantile(ttfts, 0.95)), "slowest twentieth (p95)", "of the same requests"),
      figure(count(cell.nodes), `nodes, ${plural(cell.pins, "pin")}`)));
  }

  #charts() {
    const to = Date.now();
    const points = this.#history.ttfts(to - WINDOW_MS);
    const ratios = this.#history.hitRatios(to - WINDOW_MS, 10000);
    const first = Math.min(...[points[0]?.x, this.#history.samples[0]?.ms].filter(Boolean), to - 60000);
    const from = Math.max(first, to - WINDOW_MS);
    const most = roundUp(Math.max(1, ...points.map(({ y }) => y)));
    // As wide as its place is, so that the letters of all charts are of one size.
    const width = Math.max(240, this.#place.clientWidth / (matchMedia("(max-width: 1000px)").matches ? 1 : 2) - 44);
    const nothing = h("p", { class: "quiet", text: this.#feed.requestsError || "No request has been seen yet." });
    const tell = (list, word) => (list.length ? `${plural(list.length, "value")}, the last is ${word(list.at(-1).y)}` : "nothing yet");
    return [
      panel("Cached share of prompts", { className: "span6", aside: h("span", { class: "quiet small", text: "each 10 s" }) },
        ratios.length ? chart({ title: "Cached share of prompts over time", description: tell(ratios, percent), from, to, most: 1, word: percent, width,
          series: [{ points: ratios, color: "--accent", kind: "line" }] }) : nothing),
      panel("Time to first token", { className: "span6", aside: h("span", { class: "quiet small", text: "a dot is a request" }) },
        points.length ? chart({ title: "Time to first token over time", description: tell(points, duration), from, to, most, word: duration, width,
          series: [{ points, color: "--device", kind: "dots" }] }) : nothing.cloneNode(true)),
    ];
  }

  #disks(cell) {
    const rows = Object.entries(this.#storages).map(([name, counters]) => counters === null
      ? [name, h("span", { class: "bad", text: "does not answer" }), "", "", ""]
      : [name, counters.disk_quota_bytes === undefined ? "no disk" : `${bytes(counters.disk_bytes ?? 0)} of ${bytes(counters.disk_quota_bytes)}`,
        count(counters.disk_chunks ?? 0), counters.chunks_uploaded === undefined ? "–" : count(counters.chunks_uploaded), count(counters.chunks_quarantined ?? 0)]);
    return panel("Disks and object stores", { className: "span6", aside: h("span", { class: "quiet small", text: `${count(cell.chunks)} chunks of KV, ${count(cell.hidden_chunks)} of hidden states` }) },
      this.#storagesError ? h("p", { class: "bad", text: this.#storagesError })
        : rows.length ? table("Storages", [["storage", false], ["on disk", false], ["chunks", true], ["uploaded", true], ["quarantined", true]], rows)
          : h("p", { class: "quiet", text: "No storage has joined." }));
  }

  async #askSlowly() {
    if (this.#asking || performance.now() - this.#slowlyAt < SLOWLY_MS) return;
    this.#asking = true;
    try {
      this.#storages = (await ask("/v1/cache/stats")).storages;
      this.#storagesError = "";
    } catch (error) {
      this.#storagesError = error.message;
    }
    try {
      this.#points = await ask("/v1/cache/divergences");
      this.#pointsError = "";
    } catch (error) {
      this.#pointsError = error.message;
    } finally {
      this.#asking = false;
      this.#slowlyAt = performance.now();
    }
  }
}

function tiers(cell) {
  const pools = [...cell.pools].sort((one, other) => (TIER_ORDER[one.tier] ?? 9) - (TIER_ORDER[other.tier] ?? 9) || one.owner.localeCompare(other.owner));
  return panel("Memory tiers", { className: "span12", aside: h("span", { class: "quiet small", text: `pages of ${cell.page_size} tokens` }) },
    pools.length ? null : h("p", { class: "quiet", text: "No pool: no worker and no storage has joined." }),
    ...pools.map((pool) => {
      const share = pool.total ? (pool.total - pool.free) / pool.total : 0;
      const words = `${count(pool.cached)} cached, ${count(pool.leased)} in use, ${count(pool.free)} free of ${count(pool.total)} pages`;
      const part = (name, pages) => h("i", { class: name, style: { width: `${(100 * pages) / (pool.total || 1)}%` } });
      return h("div", { class: "pool" },
        h("div", {}, h("div", { class: "clip", text: pool.owner }), h("div", { class: "quiet small", text: `${{ device: "device memory", host: "host memory", hidden: "host memory for hidden states" }[pool.tier] ?? pool.tier} ${pool.form ?? ""}`.trim() })),
        h("div", { class: "bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": pool.total, "aria-valuenow": pool.total - pool.free,
          "aria-valuetext": words, "aria-label": `${pool.owner}, ${pool.tier}` , title: words },
        part(`c-${pool.tier}`, pool.cached), part("leased", pool.leased)),
        h("div", { class: "num small" }, h("b", { text: percent(share) }), h("span", { class: "quiet", text: ` of ${count(pool.total)}` })));
    }),
    h("ul", { class: "legend" },
      h("li", {}, h("span", { class: "swatch c-device" }), h("span", { class: "swatch c-host" }), "cached"),
      h("li", {}, h("span", { class: "bar swatch" }, h("i", { class: "leased", style: { width: "100%" } })), "in use by requests and transfers"),
      h("li", {}, h("span", { class: "swatch" }), "free")));
}

function hits(cell) {
  const found = HIT_TIERS.map((tier) => [tier, cell.counters[`hit_tokens_${tier}`] ?? 0]);
  const all = found.reduce((sum, [, tokens]) => sum + tokens, 0);
  return panel("Tokens found, by tier", { className: "span6", aside: h("span", { class: "quiet small", text: "since the scheduler began" }) },
    h("div", { class: "bar", role: "img", "aria-label": found.map(([tier, tokens]) => `${sourceWord(tier)} ${count(tokens)}`).join(", ") },
      found.map(([tier, tokens]) => h("i", { class: `c-${tier}`, style: { width: `${(100 * tokens) / (all || 1)}%` } }))),
    legend(found.filter(([, tokens]) => tokens).map(([tier]) => tier), (tier) => `${sourceWord(tier)}: ${count(cell.counters[`hit_tokens_${tier}`])}`),
    all ? null : h("p", { class: "quiet", text: "None yet." }));
}

function workers(cell) {
  return panel("Workers", { className: "span6" }, cell.workers.length
    ? table("Workers", [["worker", false], ["running", true], ["waiting", true], ["state", false]],
      [...cell.workers].sort((one, other) => one.worker_id.localeCompare(other.worker_id)).map((worker) => [worker.worker_id, count(worker.running), count(worker.waiting),
        worker.draining ? h("span", { class: "warn", text: "leaving: it gets nothing new" }) : h("span", { class: "good", text: "serving" })]))
    : h("p", { class: "bad", text: "No worker has joined: nothing can be computed." }));
}

function moving(cell) {
  const facts = [["fetches from below host memory", cell.fetches], ["saves to disk", cell.saves], ["requests that wait for another's KV", cell.deferred],
    ["spans being computed", cell.in_flight_nodes], ["pages pinned", cell.pinned_pages], ["pages that callers lease", cell.leased_pages],
    ["pages evicted from devices", cell.counters.evicted_pages_device ?? 0], ["pages evicted from host memory", cell.counters.evicted_pages_host ?? 0]];
  return panel("Under way", { className: "span6", aside: h("span", { class: "quiet small", text: `scheduler ${cell.scheduler_id}, epoch ${cell.epoch}` }) },
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
