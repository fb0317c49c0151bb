// Which requests are listed, and in which order: searched, filtered by tier and by reason of a miss, sorted. Pure.

import { causeWord, hitShare } from "./words.js";

const last = (value) => value ?? -1;
const costs = (one) => one.divergence?.lost_tokens ?? -1;

/** Orders by their name in the address: what they are called, and how two requests compare. */
export const ORDERS = {
  newest: ["newest first", (one, other) => other.created_ms - one.created_ms],
  slowest: ["slowest first", (one, other) => last(other.ttft_ms) - last(one.ttft_ms)],
  missed: ["most computed first", (one, other) => computed(other) - computed(one)],
  lost: ["most lost first", (one, other) => costs(other) - costs(one)],
};

/** Requests that fit `{text, tier, reason, order}`, in that order; what is "" or not known chooses nothing. */
export function choose(requests, { text = "", tier = "", reason = "", order = "" }) {
  const wanted = text.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (one) => (!tier || one.prompt?.some((span) => span.source === tier)) && (!reason || one.prompt?.some((span) => span.reason === reason))
    && wanted.every((word) => wordsOf(one).includes(word));
  return requests.filter(fits).sort((ORDERS[order] ?? ORDERS.newest)[1]);
}

function computed(one) {
  const share = hitShare(one);
  return share === null ? -1 : one.prompt_tokens * (1 - share);
}

/** Everything of a request that a search looks at, in one text. */
function wordsOf(one) {
  const { before = "", prompt = "", cached = "", cause = "" } = one.divergence ?? {};
  return [one.id, one.request_id, one.endpoint, one.model, one.namespace, one.state, one.finish_reason, one.error_code, ...(one.workers ?? []),
    before + prompt, before + cached, causeWord(cause)].join(" ").toLowerCase();
}
