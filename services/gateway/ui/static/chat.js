// A chat that streams, and shows under each answer where its prompt came from.

import { events } from "./api.js";
import { fill, h, panel } from "./dom.js";
import { explanationView, promptBar } from "./explanation.js";
import { count, duration, hitShare, percent } from "./words.js";

export class Chat {
  #log; #text; #system; #salt; #limit; #send; #stop; #messages = []; #running = null;

  constructor(place) {
    this.#log = h("div", { class: "chat", role: "log", "aria-label": "Conversation" });
    this.#system = h("textarea", { id: "chat-system", rows: 3 });
    this.#salt = h("input", { id: "chat-salt", maxlength: 256, autocomplete: "off" });
    this.#limit = h("input", { id: "chat-limit", type: "number", min: 1, max: 4096, value: 64 });
    this.#text = h("textarea", { id: "chat-text", rows: 3, "aria-label": "Message", placeholder: "A message; Ctrl+Enter sends it",
      onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.send(); } } });
    this.#send = h("button", { type: "submit", class: "primary", text: "Send" });
    this.#stop = h("button", { type: "button", text: "Stop", hidden: true, onclick: () => this.#running?.abort() });
    fill(place, h("div", { class: "grid" },
      panel("Chat", { className: "span8" }, this.#log,
        h("form", { class: "column", onsubmit: (event) => { event.preventDefault(); this.send(); } }, this.#text,
          h("div", { class: "row" }, this.#send, this.#stop, h("button", { type: "button", text: "New conversation", onclick: () => this.#clear() })))),
      panel("Settings", { className: "span4" },
        h("label", { class: "field" }, "System prompt", this.#system),
        h("label", { class: "field" }, "Cache salt", this.#salt),
        h("label", { class: "field" }, "Tokens of an answer", this.#limit),
        h("p", { class: "quiet small", text: "Send the same beginning twice, and the second answer finds it cached." }))));
    this.#clear();
  }

  show() { this.#text.focus({ preventScroll: true }); }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    fill(this.#log, h("p", { class: "quiet", text: "Under each answer stands which part of its prompt was cached, and where." }));
  }

  async send() {
    const content = this.#text.value.trim();
    if (!content || this.#running) return;
    if (!this.#messages.length) this.#log.replaceChildren();
    const asked = { role: "user", content };
    const messages = [...(this.#system.value.trim() ? [{ role: "system", content: this.#system.value }] : []), ...this.#messages, asked];
    const answer = h("div", { class: "turn", "aria-busy": "true", text: "…" });
    const below = h("div", { class: "turn-explained" });
    this.#log.append(h("div", { class: "turn user", text: content }), answer, below);
    this.#text.value = "";
    this.#running = new AbortController();
    const running = this.#running;
    this.#send.disabled = true;
    this.#stop.hidden = false;
    let text = "";
    let explained = null;
    try {
      const body = { messages, stream: true, explain: true, max_tokens: Number(this.#limit.value) || 64,
        ...(this.#salt.value ? { cache_salt: this.#salt.value } : {}) };
      for await (const event of events("/v1/chat/completions", { method: "POST", body, signal: running.signal })) {
        if (event.error) throw new Error(event.error.message);
        text += event.choices?.[0]?.delta?.content ?? "";
        explained = event.explanation ?? explained;
        if (text) answer.textContent = text;
      }
      if (!text) answer.textContent = "(an answer without text)";
      this.#messages.push(asked, { role: "assistant", content: text });
      fill(below, told(explained));
    } catch (error) {
      const stopped = running.signal.aborted;
      if (!text) answer.textContent = stopped ? "(stopped)" : "(no answer)";
      fill(below, h("p", { class: stopped ? "quiet" : "bad", role: "status", text: stopped ? "Stopped; this turn is not part of the conversation." : error.message }));
      if (!stopped) this.#text.value ||= content;
    } finally {
      answer.removeAttribute("aria-busy");
      if (this.#running === running) this.#running = null;
      this.#send.disabled = false;
      this.#stop.hidden = true;
      below.scrollIntoView({ block: "nearest" });
    }
  }
}

function told(explained) {
  if (!explained) return h("p", { class: "quiet small", text: "This gateway did not explain the answer." });
  return h("details", { class: "column" },
    h("summary", {}, h("span", { class: "small", text: ` ${percent(hitShare(explained))} of ${count(explained.prompt_tokens)} prompt tokens cached, first token after ${duration(explained.ttft_ms)} ` }), promptBar(explained)),
    explanationView(explained, { hasBar: true }));
}
