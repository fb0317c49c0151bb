// Recent requests as waterfalls of their time to first token; one of them in full beside them.

import { ask } from "./api.js";
import { fill, h, legend, panel } from "./dom.js";
import { explanationView, partsBar, promptBar } from "./explanation.js";
import { PARTS, SOURCES, clockTime, count, duration, hitShare, partWord, percent, sourceWord } from "./words.js";

const SHOWN = 60;

export class Requests {
  #place; #feed; #list; #detail; #picked = null; #explained = null; #error = ""; #isPaused = false; #isPressed = false;

  constructor(place, feed) {
    this.#place = place;
    this.#feed = feed;
    this.#list = h("div", { class: "column" });
    this.#detail = h("div", { "aria-live": "polite" });
    const hold = h("input", { type: "checkbox", id: "hold", onchange: () => { this.#isPaused = hold.checked; this.draw(); } });
    fill(place, h("div", { class: "grid" },
      panel("Recent requests", { className: "span7", aside: h("label", { class: "small", for: "hold" }, hold, " hold still") },
        this.#list),
      panel("One request", { className: "span5", id: "request-detail" }, this.#detail)));
    // A row that is replaced between press and release of the pointer would never be clicked.
    this.#list.addEventListener("pointerdown", () => { this.#isPressed = true; });
    for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { this.#isPressed = false; });
    feed.addEventListener("requests", () => this.#isPaused || this.#isPressed || this.draw());
    this.#drawDetail();
  }

  show() { this.draw(); }

  draw() {
    if (this.#place.hidden) return;
    const { requests, requestsError } = this.#feed;
    if (requestsError) {
      fill(this.#list, h("p", { class: "bad", text: requestsError }));
      return;
    }
    if (!requests.length) {
      fill(this.#list, h("p", { class: "quiet", text: "No request has come lately." }));
      return;
    }
    const shown = requests.slice(0, SHOWN);
    const scale = Math.max(...shown.map((one) => one.ttft_ms ?? 0), 0.001);
    const parts = PARTS.filter((name) => shown.some((one) => one.parts?.some((part) => part.name === name && part.ms > 0)));
    const sources = SOURCES.filter((name) => shown.some((one) => one.prompt?.some((span) => span.source === name)));
    fill(this.#list,
      h("div", { class: "row small" }, h("b", { text: "time" }), legend(parts, partWord)),
      h("div", { class: "row small" }, h("b", { text: "prompt" }), legend(sources, sourceWord)),
      h("p", { class: "quiet small", text: `A full bar is ${duration(scale)}. ${requests.length > SHOWN ? `The latest ${SHOWN} of ${requests.length}.` : ""}` }),
      h("div", { class: "scroll" }, h("table", {},
        h("caption", { class: "only-read", text: "Recent requests" }),
        h("thead", {}, h("tr", {}, ["came", "first token", "its parts, and below where the prompt came from", "prompt", "cached"].map((name, place) =>
          h("th", { scope: "col", class: [1, 3, 4].includes(place) ? `num ${place === 3 ? "narrow-hide" : ""}` : null, text: name })))),
        h("tbody", {}, shown.map((one) => this.#row(one, scale))))));
  }

  #row(one, scale) {
    const share = hitShare(one);
    return h("tr", { class: "pick", "aria-current": String(one.request_id === this.#picked), onclick: () => this.pick(one) },
      h("td", {}, h("button", { type: "button", class: "plain", id: `request-${one.request_id}`, text: clockTime(one.created_ms), "aria-label": `Explain the request of ${clockTime(one.created_ms)}` }), stateMark(one)),
      h("td", { class: "num", text: duration(one.ttft_ms) }),
      h("td", { style: { width: "45%" } }, partsBar(one, scale), promptBar(one, "thin")),
      h("td", { class: "num narrow-hide", text: count(one.prompt_tokens) }),
      h("td", { class: "num", text: percent(share) }));
  }

  /** Show one request in full; asked for anew, since the list may tell less. */
  async pick(one) {
    this.#picked = one.request_id;
    this.#explained = one;
    this.#error = "";
    this.draw();
    this.#drawDetail();
    try {
      const found = await ask(`/v1/requests/${encodeURIComponent(one.id)}/explain`);
      // A request with several prompts or choices is one id with several explanations; that of the row stays.
      if (this.#picked === one.request_id && found.request_id === one.request_id) this.#explained = found;
    } catch (error) {
      if (this.#picked === one.request_id) this.#error = error.message;
    }
    this.#drawDetail();
  }

  #drawDetail() {
    const one = this.#explained;
    if (!one) {
      fill(this.#detail, h("p", { class: "quiet", text: "Choose a request to see where each part of its prompt came from." }));
      return;
    }
    const facts = [["request", one.id], ["state", [one.state, one.finish_reason, one.error_code].filter(Boolean).join(", ")], ["endpoint", one.endpoint],
      ["came", clockTime(one.created_ms)], ["tokens", `${count(one.prompt_tokens)} in, ${count(one.completion_tokens)} out`],
      ["took", duration(one.total_ms)], ["on", `${(one.workers ?? []).join(", ") || "no worker yet"}${one.attempts > 1 ? `, ${one.attempts} attempts` : ""}`],
      ["namespace", one.namespace]];
    fill(this.#detail, h("div", { class: "column" },
      this.#error ? h("p", { class: "bad", text: this.#error }) : null,
      h("dl", { class: "facts" }, facts.flatMap(([what, value]) => [h("dt", { text: what }), h("dd", { class: what === "namespace" || what === "request" ? "mono" : null, text: value || "–" })])),
      explanationView(one)));
  }
}

function stateMark(one) {
  if (one.state === "finished") return null;
  return h("span", { class: `small ${one.state === "failed" ? "bad" : "quiet"}`, text: ` ${one.error_code ?? one.state}` });
}
