// Requests as waterfalls of their time to first token: all that are kept, searched, filtered and sorted; one of them in full.

import { readAddress, writeAddress } from "./address.js";
import { ask } from "./api.js";
import { fill, h, isBeingSelected, legend, pager, panel, say } from "./dom.js";
import { explanationView, partsBar, promptBar } from "./explanation.js";
import { ORDERS, choose } from "./request_choice.js";
import { PARTS, REASONS, SOURCES, clockTime, count, duration, hitShare, partWord, percent, plural, reasonWord, sourceWord } from "./words.js";

const ROWS = 50;

export class Requests {
  #place; #feed; #list; #said; #detail; #panel; #text; #order; #tier; #reason; #first = 0; #picked = ""; #explained = null; #error = "";
  #isPaused = false; #isPressed = false;

  constructor(place, feed) {
    this.#place = place;
    this.#feed = feed;
    this.#list = h("div", { class: "column" });
    this.#said = h("span", { class: "quiet small", role: "status", id: "requests-said" });
    this.#detail = h("div", { "aria-live": "polite" });
    const changed = () => { this.#first = 0; this.#write(); this.draw(); };
    const options = (name, all, words) => h("select", { id: `requests-${name}`, onchange: changed }, all, words.map(([value, text]) => h("option", { value, text })));
    const any = (text) => h("option", { value: "", text });
    this.#text = h("input", { type: "search", id: "requests-search", "aria-label": "Search requests", placeholder: "id, model, worker, error or text", oninput: changed });
    this.#order = options("order", null, Object.entries(ORDERS).map(([name, [words]]) => [name, words]));
    this.#tier = options("tier", any("any tier"), SOURCES.map((source) => [source, sourceWord(source)]));
    this.#reason = options("reason", any("any reason"), REASONS.map((reason) => [reason, reasonWord(reason)]));
    const hold = h("input", { type: "checkbox", id: "hold", onchange: () => { this.#isPaused = hold.checked; this.draw(); } });
    this.#panel = panel("One request", { className: "span5", id: "request-detail" },
      h("button", { type: "button", class: "narrow-only", id: "request-back", text: "↑ All requests", onclick: () => this.#close() }), this.#detail);
    fill(place, h("div", { class: "grid" },
      panel("Requests", { className: "span7", aside: this.#said },
        h("div", { class: "row" }, this.#text, this.#order, this.#tier, this.#reason, h("label", { class: "row small", for: "hold" }, hold, "hold still")), this.#list),
      this.#panel));
    for (const [field, name] of [[this.#order, "Order"], [this.#tier, "Tokens from"], [this.#reason, "Reason of a miss"]]) field.setAttribute("aria-label", name);
    // A row that is replaced between press and release of the pointer would never be clicked.
    this.#list.addEventListener("pointerdown", () => { this.#isPressed = true; });
    for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { this.#isPressed = false; });
    feed.addEventListener("requests", () => this.#isPaused || this.#isPressed || isBeingSelected(this.#list) || this.draw());
    feed.addEventListener("link", () => { if (feed.isLive && this.#picked && !this.#explained && !this.#error) this.#ask(this.#picked); });
    this.#drawDetail();
  }

  /** As the address says, which may name a request and what is listed, or as it was left. */
  show(isFollowed) {
    if (isFollowed) {
      const { item, params } = readAddress();
      this.#text.value = params.get("q") ?? "";
      this.#order.value = params.get("sort") in ORDERS ? params.get("sort") : "newest";
      this.#tier.value = SOURCES.includes(params.get("tier")) ? params.get("tier") : "";
      this.#reason.value = REASONS.includes(params.get("reason")) ? params.get("reason") : "";
      if (item !== this.#picked) this.#open(item);
    }
    this.#write();
    this.draw();
  }

  focusSearch() { this.#text.focus(); }

  /** What Export JSON saves. */
  data() {
    return { chosen: this.#chosen(), requests: this.#listed(), request: this.#explained };
  }

  #chosen() {
    return { text: this.#text.value, order: this.#order.value, tier: this.#tier.value, reason: this.#reason.value };
  }

  #listed() { return choose(this.#feed.requests, this.#chosen()); }

  #write(push = false) {
    if (this.#place.hidden) return;
    const { text, order, tier, reason } = this.#chosen();
    writeAddress("requests", this.#picked, { q: text, sort: order === "newest" ? "" : order, tier, reason }, { push });
  }

  draw() {
    if (this.#place.hidden) return;
    const { requests, requestsError } = this.#feed;
    const listed = this.#listed();
    say(this.#said, requests.length ? `${listed.length === requests.length ? "all" : `${count(listed.length)} of`} ${plural(requests.length, "request")} that are kept` : "");
    if (requestsError || !listed.length) {
      fill(this.#list, h("p", { class: requestsError ? "bad" : "quiet", text: requestsError || (requests.length ? "No request matches." : "There are no recent requests.") }));
      return;
    }
    this.#first = Math.min(this.#first, ROWS * Math.floor((listed.length - 1) / ROWS));
    const shown = listed.slice(this.#first, this.#first + ROWS);
    const scale = Math.max(...shown.map((one) => one.ttft_ms ?? 0), 0.001);
    const parts = PARTS.filter((name) => shown.some((one) => one.parts?.some((part) => part.name === name && part.ms > 0)));
    const sources = SOURCES.filter((name) => shown.some((one) => one.prompt?.some((span) => span.source === name)));
    fill(this.#list,
      h("div", { class: "row small" }, h("b", { text: "time" }), legend(parts, partWord)),
      h("div", { class: "row small" }, h("b", { text: "prompt" }), legend(sources, sourceWord)),
      h("p", { class: "quiet small", text: `A full bar is ${duration(scale)}.` }),
      h("div", { class: "scroll" }, h("table", {},
        h("caption", { class: "only-read", text: "Requests" }),
        h("thead", {}, h("tr", {}, ["came", "first token", "its parts, and below where the prompt came from", "prompt tokens", "cached"].map((name, place) =>
          h("th", { scope: "col", class: [1, 3, 4].includes(place) ? `num ${place === 3 ? "narrow-hide" : ""}` : null, text: name })))),
        h("tbody", {}, shown.map((one) => this.#row(one, scale))))),
      pager("requests", this.#first, ROWS, listed.length, (first) => { this.#first = first; this.draw(); }));
  }

  #row(one, scale) {
    return h("tr", { class: "pick", "aria-current": String(this.#is(one)), onclick: () => this.pick(one) },
      h("td", {}, h("button", { type: "button", class: "plain", id: `request-${one.request_id}`, text: clockTime(one.created_ms), "aria-label": `Explain the request of ${clockTime(one.created_ms)}` }), stateMark(one)),
      h("td", { class: "num", text: duration(one.ttft_ms) }),
      h("td", { style: { width: "45%" } }, partsBar(one, scale), promptBar(one, "thin")),
      h("td", { class: "num narrow-hide", text: count(one.prompt_tokens) }),
      h("td", { class: "num", text: percent(hitShare(one)) }));
  }

  /** Whether it is the one that is shown in full, which an address may name by either id. */
  #is(one) { return one.request_id === this.#picked || (!this.#explained && one.id === this.#picked); }

  /** Show one request in full, and bring it into view where the list is above it. */
  pick(one) {
    this.#open(one.request_id, one);
    this.#write(true);
    this.draw();
    if (this.#panel.getBoundingClientRect().top > window.innerHeight - 200 || this.#panel.getBoundingClientRect().bottom < 200) this.#panel.scrollIntoView({ block: "start" });
  }

  /** Show the request of this id, which may be that of its HTTP response; "" for none. */
  #open(name, one = this.#feed.requests.find(({ request_id: id, id: http }) => id === name || http === name)) {
    this.#picked = one?.request_id ?? name;
    this.#explained = one ?? null;
    this.#error = "";
    this.#drawDetail();
    if (name && (one || this.#feed.isLive)) this.#ask(one?.id ?? name);
  }

  /** Asked for anew, since the list may tell less. */
  async #ask(name) {
    const picked = this.#picked;
    try {
      const found = await ask(`/v1/requests/${encodeURIComponent(name)}/explain`);
      if (this.#picked !== picked) return;
      // A request with several prompts or choices is one id with several explanations; that of the row stays.
      if (!this.#explained || found.request_id === picked) this.#explained = found;
      this.#picked = this.#explained.request_id;
      this.#error = "";
    } catch (error) {
      if (this.#picked !== picked) return;
      this.#error = this.#explained ? `${error.message} The page shows its own older copy.` : error.message;
    }
    this.#drawDetail();
    this.draw();
  }

  /** Back from one request to its row. */
  #close() {
    const row = document.getElementById(`request-${this.#picked}`);
    row?.focus({ preventScroll: true });
    (row ?? this.#list).scrollIntoView({ block: "center" });
  }

  #drawDetail() {
    const one = this.#explained;
    const error = this.#error ? h("p", { class: "bad", role: "status", text: this.#error }) : null;
    if (!one) {
      fill(this.#detail, error ?? h("p", { class: "quiet", text: this.#picked ? "Asking the gateway…" : "Choose a request to see where its time went and where each part of its prompt came from." }));
      return;
    }
    const facts = [["request", one.id], ["state", [one.state, one.finish_reason, one.error_code].filter(Boolean).join(", ")], ["endpoint", one.endpoint], ["model", one.model],
      ["came", new Date(one.created_ms).toLocaleString("en-GB")], ["tokens", `${count(one.prompt_tokens)} in, ${count(one.completion_tokens)} out`],
      ["took", duration(one.total_ms)], ["on", `${(one.workers ?? []).join(", ") || "no worker yet"}${one.attempts > 1 ? `, ${one.attempts} attempts` : ""}`],
      ["namespace", one.namespace]];
    fill(this.#detail, h("div", { class: "column" }, error, explanationView(one),
      h("h3", { text: "The request" }),
      h("dl", { class: "facts" }, facts.flatMap(([what, value]) => [h("dt", { text: what }), h("dd", { class: what === "namespace" || what === "request" ? "mono" : null, text: value || "–" })]))));
  }
}

function stateMark(one) {
  if (one.state === "finished") return null;
  return h("span", { class: `small ${one.state === "failed" ? "bad" : "quiet"}`, text: ` ${one.error_code ?? one.state}` });
}
