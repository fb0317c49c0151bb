// A chat that streams, and shows under each answer where its prompt came from. A reload keeps it; the tab's end does not.

import { writeAddress } from "./address.js";
import { events } from "./api.js";
import { fill, h, panel } from "./dom.js";
import { explanationView, promptBar } from "./explanation.js";
import { count, duration, hitShare, percent } from "./words.js";

const NAME = "thermocline.chat";
const MOST_CHARS = 2 ** 21; // Browsers keep about twice as many.

export class Chat {
  #log; #text; #system; #salt; #limit; #send; #stop; #said; #running = null;
  #turns = []; // {asked, reasoning, answer, explained} of what is over.

  constructor(place) {
    this.#log = h("div", { class: "chat", role: "log", "aria-label": "Conversation" });
    const kept = () => this.#keep();
    this.#system = h("textarea", { id: "chat-system", rows: 3, oninput: kept });
    this.#salt = h("input", { id: "chat-salt", maxlength: 256, autocomplete: "off", oninput: kept });
    this.#limit = h("input", { id: "chat-limit", type: "number", min: 1, max: 4096, value: 64, oninput: kept });
    this.#text = h("textarea", { id: "chat-text", rows: 3, "aria-label": "Message", placeholder: "A message; Enter sends, Shift + Enter breaks the line", oninput: kept,
      onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); } } });
    this.#send = h("button", { type: "submit", class: "primary", text: "Send" });
    this.#stop = h("button", { type: "button", text: "Stop", hidden: true, onclick: () => this.#running?.abort() });
    this.#said = h("p", { class: "quiet small", role: "status" });
    fill(place, h("div", { class: "grid" },
      panel("Chat", { className: "span8" }, this.#log,
        h("form", { class: "column", onsubmit: (event) => { event.preventDefault(); this.send(); } }, this.#text,
          h("div", { class: "row" }, this.#send, this.#stop, h("button", { type: "button", text: "New conversation", onclick: () => this.#clear() }), this.#said))),
      panel("Settings", { className: "span4" },
        h("label", { class: "field" }, "System prompt", this.#system),
        h("label", { class: "field" }, "Cache salt", this.#salt),
        h("label", { class: "field" }, "Tokens of an answer", this.#limit),
        h("p", { class: "quiet small", text: "Send the same beginning twice, and the second answer finds it cached." }))));
    this.#restore();
  }

  show() {
    writeAddress("chat");
    this.#text.focus({ preventScroll: true });
  }

  /** What Export JSON saves. */
  data() { return { system: this.#system.value, turns: this.#turns }; }

  #clear() {
    this.#running?.abort();
    this.#turns = [];
    fill(this.#log, h("p", { class: "quiet", text: "Below each answer the page shows which part of its prompt was cached, and where." }));
    this.#keep();
  }

  /** In this tab's storage, as the keys are: prompts may be confidential. What is too long is not kept, and that is said. */
  #keep(draft = this.#text.value) {
    const fields = { system: this.#system.value, salt: this.#salt.value, limit: this.#limit.value, draft };
    const whole = JSON.stringify({ ...fields, turns: this.#turns });
    const isShort = whole.length <= MOST_CHARS;
    try {
      sessionStorage.setItem(NAME, isShort ? whole : JSON.stringify({ ...fields, turns: [] }));
      this.#said.textContent = isShort ? "" : "This conversation is too long to be kept across a reload.";
    } catch (error) {
      this.#said.textContent = `A reload will lose this conversation: ${error.name}.`;
    }
  }

  #restore() {
    let kept = {};
    try { kept = JSON.parse(sessionStorage.getItem(NAME) ?? "{}"); } catch { /* It cannot be read, so it begins anew. */ }
    this.#clear();
    this.#system.value = kept.system ?? "";
    this.#salt.value = kept.salt ?? "";
    this.#limit.value = kept.limit ?? 64;
    this.#text.value = kept.draft ?? "";
    for (const turn of kept.turns ?? []) {
      const { answer, below, think } = this.#append(turn.asked);
      think(turn.reasoning);
      answer.textContent = turn.answer || "(an answer without text)";
      fill(below, told(turn.explained));
      this.#turns.push(turn);
    }
    this.#keep();
  }

  #append(asked) {
    if (!this.#log.querySelector(".turn")) this.#log.replaceChildren();
    const answer = h("div", { class: "turn" });
    const below = h("div", { class: "turn-explained" });
    const thoughts = h("div", { class: "reasoning quiet small" });
    const thinking = h("details", { hidden: true }, h("summary", { class: "small", text: "Reasoning" }), thoughts);
    const think = (words) => { thinking.hidden = !words; thoughts.textContent = words ?? ""; };
    this.#log.append(h("div", { class: "turn user", text: asked }), thinking, answer, below);
    return { answer, below, think };
  }

  async send() {
    const asked = this.#text.value.trim();
    if (!asked || this.#running) return;
    const messages = [...(this.#system.value.trim() ? [{ role: "system", content: this.#system.value }] : []),
      ...this.#turns.flatMap((turn) => [{ role: "user", content: turn.asked }, { role: "assistant", content: turn.answer, ...(turn.reasoning ? { reasoning_content: turn.reasoning } : {}) }]), { role: "user", content: asked }];
    const { answer, below, think } = this.#append(asked);
    answer.textContent = "…";
    answer.setAttribute("aria-busy", "true");
    this.#text.value = "";
    this.#keep(asked); // A reload before the answer is there brings the question back.
    this.#running = new AbortController();
    const running = this.#running;
    this.#send.disabled = true;
    this.#stop.hidden = false;
    let text = "";
    let reasoning = "";
    let explained = null;
    try {
      const body = { messages, stream: true, explain: true, max_tokens: Number(this.#limit.value) || 64,
        ...(this.#salt.value ? { cache_salt: this.#salt.value } : {}) };
      for await (const event of events("/v1/chat/completions", { method: "POST", body, signal: running.signal })) {
        if (event.error) throw new Error(event.error.message);
        const { content, reasoning_content: thought } = event.choices?.[0]?.delta ?? {};
        text += content ?? "";
        if (thought) think(reasoning += thought);
        explained = event.explanation ?? explained;
        if (text) answer.textContent = text;
      }
      if (!text) answer.textContent = "(an answer without text)";
      running.signal.throwIfAborted();
      this.#turns.push({ asked, reasoning, answer: text, explained });
      fill(below, told(explained));
    } catch (error) {
      const stopped = running.signal.aborted;
      if (!text) answer.textContent = stopped ? "(stopped)" : "(no answer)";
      fill(below, h("p", { class: stopped ? "quiet" : "bad", role: "status", text: stopped ? "Stopped; this turn is not part of the conversation." : error.message }));
      if (!stopped) this.#text.value ||= asked;
    } finally {
      answer.removeAttribute("aria-busy");
      if (this.#running === running) this.#running = null;
      this.#send.disabled = false;
      this.#stop.hidden = true;
      this.#keep();
      below.scrollIntoView({ block: "nearest" });
    }
  }
}

function told(explained) {
  if (!explained) return h("p", { class: "quiet small", text: "This gateway did not explain the answer." });
  return h("details", { class: "column" },
    h("summary", {}, h("span", { class: "small", text: ` ${percent(hitShare(explained))} of ${count(explained.prompt_tokens)} prompt tokens cached, first token after ${duration(explained.ttft_ms)}${explained.finish_reason === "length" ? "; the answer ends at its limit of tokens" : ""} ` }), promptBar(explained)),
    explanationView(explained, { hasBar: true }));
}
