// What the page remembers of the past, across reloads: bounded in number and in time, and figures alone, no text of a prompt.

import { hitShare, tokensBySource } from "./words.js";

const NAME = "thermocline.history";
const FINE = 900; // A quarter of an hour at one a second;
const COARSE_MS = 10000; // before that, one in ten seconds,
const KEPT_MS = 6 * 3600 * 1000; // for six hours.
const REQUESTS = 2000;
const SAVE_MS = 10000;

export class History {
  fault = ""; // Why it is not kept.
  #model = ""; #fine = []; #coarse = []; #requests = new Map(); #savedMs = 0;

  constructor() {
    try {
      const kept = JSON.parse(localStorage.getItem(NAME) ?? "{}");
      this.#model = kept.model ?? "";
      this.#coarse = kept.samples ?? [];
      this.#requests = new Map((kept.requests ?? []).slice(-REQUESTS).map((one) => [one.id, one]));
    } catch { /* Nothing, or nothing that can be read, was kept: it begins anew. */ }
    addEventListener("pagehide", () => this.save());
  }

  /** A sample {ms, running, queued, occupancy: {tier: share}, flows: {"from>to": tokens}} of a cell and its storages. */
  addCell(cell, storages, nowMs) {
    if (this.#model !== cell.model) {
      if (this.#model) { this.#fine = []; this.#coarse = []; this.#requests.clear(); } // Of another model; nothing of it compares.
      this.#model = cell.model;
    }
    const sample = { ms: nowMs, running: cell.running, queued: cell.queued, occupancy: occupancy(cell), flows: flowTotals(cell, storages) };
    this.#fine.push(sample);
    if (this.#fine.length > FINE) this.#fine.shift();
    if (nowMs - (this.#coarse.at(-1)?.ms ?? 0) >= COARSE_MS) this.#coarse.push(sample);
    while (this.#coarse.length && this.#coarse[0].ms < nowMs - KEPT_MS) this.#coarse.shift();
    if (nowMs - this.#savedMs >= SAVE_MS) {
      this.#savedMs = nowMs;
      this.save();
    }
  }

  addRequests(list, nowMs) {
    // The oldest first, since what was put in first goes first.
    for (const one of [...list].reverse()) {
      if (one.ttft_ms === null || one.ttft_ms === undefined || one.created_ms < nowMs - KEPT_MS) continue;
      const found = tokensBySource(one);
      const prompt = found ? Object.values(found).reduce((sum, tokens) => sum + tokens, 0) : 0;
      this.#requests.set(one.request_id, { id: one.request_id, ms: one.created_ms, ttft: one.ttft_ms, prompt, share: hitShare(one) });
    }
    for (const [id, { ms }] of this.#requests) {
      if (this.#requests.size <= REQUESTS && ms >= nowMs - KEPT_MS) break;
      this.#requests.delete(id);
    }
  }

  /** Keep it for the next time; where the browser will not, `fault` says so. */
  save() {
    if (!this.#model) return;
    try {
      localStorage.setItem(NAME, JSON.stringify({ model: this.#model, samples: this.#coarse, requests: [...this.#requests.values()] }));
      this.fault = "";
    } catch (error) {
      this.fault = `This browser keeps no history: ${error.name}.`;
    }
  }

  /** Samples since a moment, the oldest first. */
  samples(sinceMs) {
    const fine = this.#fine[0]?.ms ?? Infinity;
    return [...this.#coarse.filter(({ ms }) => ms < fine), ...this.#fine].filter(({ ms }) => ms >= sinceMs);
  }

  /** When the oldest of all that is remembered was; null for nothing. */
  beginMs() {
    const begins = [this.#coarse[0]?.ms, this.#fine[0]?.ms, ...[...this.#requests.values()].map(({ ms }) => ms)].filter(Boolean);
    return begins.length ? begins.reduce((one, other) => Math.min(one, other)) : null;
  }

  /** Tokens per second on each way between places, over the last `overMs`; empty before two samples. */
  rates(overMs) {
    const last = this.#fine.at(-1);
    const first = last && this.#fine.find(({ ms }) => ms >= last.ms - overMs);
    if (!last || first === last) return {};
    return Object.fromEntries(Object.entries(last.flows).map(([way, tokens]) =>
      [way, Math.max(0, (1000 * (tokens - (first.flows[way] ?? tokens))) / (last.ms - first.ms))]));
  }

  /** Times to first token, as points. */
  ttfts(sinceMs) {
    return [...this.#requests.values()].filter((one) => one.ms >= sinceMs).map((one) => ({ x: one.ms, y: one.ttft })).sort((a, b) => a.x - b.x);
  }

  /** The share of prompt tokens that were cached, of requests within each `stepMs`. */
  hitRatios(sinceMs, stepMs) {
    const steps = new Map();
    for (const { ms, prompt, share } of this.#requests.values()) {
      if (ms < sinceMs || share === null) continue;
      const at = Math.floor(ms / stepMs) * stepMs;
      const step = steps.get(at) ?? { prompt: 0, cached: 0 };
      step.prompt += prompt;
      step.cached += prompt * share;
      steps.set(at, step);
    }
    return [...steps].sort(([a], [b]) => a - b).map(([at, step]) => ({ x: at + stepMs / 2, y: step.cached / step.prompt }));
  }

  /** The hit ratio over everything remembered since then, null without any. */
  hitRatio(sinceMs) {
    const [whole] = this.hitRatios(sinceMs, Number.MAX_SAFE_INTEGER);
    return whole ? whole.y : null;
  }
}

/** The share of each tier's pages that hold something. */
function occupancy(cell) {
  const tiers = {};
  for (const pool of cell.pools) {
    const tier = (tiers[pool.tier] ??= { used: 0, total: 0 });
    tier.used += pool.total - pool.free;
    tier.total += pool.total;
  }
  return Object.fromEntries(Object.entries(tiers).map(([name, { used, total }]) => [name, total ? used / total : 0]));
}

/** Tokens that have gone each way. Uploads are the storages' to count. */
function flowTotals(cell, storages) {
  const totals = Object.fromEntries((cell.flows ?? []).map(({ source, target, tokens }) => [`${source}>${target}`, tokens]));
  const counted = Object.values(storages);
  if (!counted.length || counted.includes(null)) return totals; // A part of the sum would look like a jump later.
  return { ...totals, "disk>remote": cell.chunk_tokens * counted.reduce((sum, { chunks_uploaded: chunks = 0 }) => sum + chunks, 0) };
}

/** Nearest-rank quantile of numbers; null for none. */
export function quantile(values, fraction) {
  if (!values.length) return null;
  const ordered = [...values].sort((a, b) => a - b);
  return ordered[Math.min(ordered.length - 1, Math.floor(fraction * ordered.length))];
}
