// What the page remembers of the past: bounded, and gone when the tab closes.

import { hitShare, tokensBySource } from "./words.js";

const SAMPLES = 900; // A quarter of an hour at one a second.
const REQUESTS = 2000;

export class History {
  samples = []; // {ms, running, queued, occupancy: {tier: share}}
  requests = new Map(); // By request id: {ms, ttft, prompt, cached}

  addCell(cell, nowMs) {
    const tiers = {};
    for (const pool of cell.pools) {
      const tier = (tiers[pool.tier] ??= { used: 0, total: 0 });
      tier.used += pool.total - pool.free;
      tier.total += pool.total;
    }
    const occupancy = Object.fromEntries(Object.entries(tiers).map(([name, { used, total }]) => [name, total ? used / total : 0]));
    this.samples.push({ ms: nowMs, running: cell.running, queued: cell.queued, occupancy });
    if (this.samples.length > SAMPLES) this.samples.shift();
  }

  addRequests(list) {
    // The oldest first, since what was put in first goes first.
    for (const one of [...list].reverse()) {
      if (one.ttft_ms === null || one.ttft_ms === undefined) continue;
      const found = tokensBySource(one);
      const prompt = found ? Object.values(found).reduce((sum, tokens) => sum + tokens, 0) : 0;
      this.requests.set(one.request_id, { ms: one.created_ms, ttft: one.ttft_ms, prompt, share: hitShare(one) });
    }
    while (this.requests.size > REQUESTS) this.requests.delete(this.requests.keys().next().value);
  }

  /** Times to first token, as points. */
  ttfts(sinceMs) {
    return [...this.requests.values()].filter((one) => one.ms >= sinceMs).map((one) => ({ x: one.ms, y: one.ttft })).sort((a, b) => a.x - b.x);
  }

  /** The share of prompt tokens that were cached, of requests within each `stepMs`. */
  hitRatios(sinceMs, stepMs) {
    const steps = new Map();
    for (const { ms, prompt, share } of this.requests.values()) {
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

/** Nearest-rank quantile of numbers; null for none. */
export function quantile(values, fraction) {
  if (!values.length) return null;
  const ordered = [...values].sort((a, b) => a - b);
  return ordered[Math.min(ordered.length - 1, Math.floor(fraction * ordered.length))];
}
