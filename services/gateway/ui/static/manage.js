// What changes the cache: pins, prewarming, flushing. Each says what came of it.

import { writeAddress } from "./address.js";
import { ask } from "./api.js";
import { confirm } from "./dialogs.js";
import { fill, h, panel, table } from "./dom.js";
import { count, duration, percent, plural } from "./words.js";

const LONG_MS = 10 * 60 * 1000; // Prewarming computes, and a flush waits for disks.
const TIERS = [["device", "device memory"], ["host", "host memory"], ["disk", "disks"], ["remote", "object stores"]];

export class Manage {
  #place; #pins; #leases; #said; #listed = { pins: [], leases: [] }; #isMissing = false;

  constructor(place, feed) {
    this.#place = place;
    this.#pins = h("div", {});
    this.#leases = h("div", {});
    this.#said = h("p", { role: "status", id: "manage-said", class: "small" });
    fill(place, h("div", { class: "column" }, this.#said, h("div", { class: "grid" }, this.#pinForm(), this.#warmForm(), this.#flushForm(),
      panel("Pins", { className: "span12", aside: h("button", { type: "button", class: "small", text: "Refresh", onclick: () => this.show() }) }, this.#pins),
      panel("Leases", { className: "span12" }, this.#leases))));
    feed.addEventListener("link", () => { if (feed.isLive && this.#isMissing) this.show(); });
  }

  async show() {
    if (this.#place.hidden) return;
    writeAddress("cache");
    this.#isMissing = false;
    try {
      const pins = (await ask("/v1/cache/pins")).data;
      fill(this.#pins, pins.length ? table("Pins", [["name", false], ["tokens held", true], ["pages", true], ["until", false], ["", false]], pins.map((pin) => [
        pin.name, `${count(pin.held_tokens)} of ${count(pin.tokens)}`, count(pin.pages),
        pin.refusal ? h("span", { class: "bad", text: pin.refusal }) : new Date(pin.expires_at * 1000).toLocaleString("en-GB"),
        h("button", { type: "button", class: "danger", text: "Unpin", "aria-label": `Unpin ${pin.name}`, onclick: () => this.#unpin(pin.name) })]))
        : h("p", { class: "quiet", text: "There is no pin." }));
      const leases = (await ask("/v1/cache/leases")).data;
      this.#listed = { pins, leases };
      fill(this.#leases, leases.length ? table("Leases", [["tenant", false], ["key", false], ["tokens", true], ["kept for", true], ["until", false]], leases.map((lease) => [
        lease.tenant || "–", lease.key || "–", count(lease.tokens), duration(1000 * lease.ttl_s), new Date(lease.expires_at * 1000).toLocaleString("en-GB")]))
        : h("p", { class: "quiet", text: "No caller has leased a prefix." }));
    } catch (error) {
      this.#isMissing = true; // It is asked for again once the cell is heard.
      fill(this.#pins, h("p", { class: "bad", text: error.message }));
    }
  }

  /** What Export JSON saves. */
  data() { return this.#listed; }

  #say(words, className = "good") {
    this.#said.className = `small ${className}`;
    this.#said.textContent = words;
  }

  /** Run one order with its button off; what it gives is said, and so is what went wrong. */
  async #order(button, working, call) {
    button.disabled = true;
    this.#say(working, "quiet");
    try {
      this.#say(await call());
      await this.show();
    } catch (error) {
      this.#say(error.message, "bad");
    } finally {
      button.disabled = false;
    }
  }

  #pinForm() {
    const prompt = h("textarea", { id: "pin-prompt", rows: 4, required: true });
    const name = h("input", { id: "pin-name", pattern: "[A-Za-z0-9_\\-]{1,64}", title: "1 to 64 letters, digits, - or _" });
    const minutes = h("input", { id: "pin-minutes", type: "number", min: 1, max: 527040, value: 60, required: true });
    const salt = h("input", { id: "pin-salt", maxlength: 256 });
    const go = h("button", { type: "submit", class: "primary", text: "Pin…" });
    return panel("Pin a prefix", { className: "span4" }, h("form", { class: "column", onsubmit: async (event) => {
      event.preventDefault();
      if (!(await confirm("Pin this prefix?", `It stays in host memory for ${plural(Number(minutes.value), "minute")}, and takes that memory from other prefixes.`, "Pin it"))) return;
      await this.#order(go, "Pinning…", async () => {
        const pin = await ask("/v1/cache/pins", { method: "POST", body: { prompt: prompt.value, ttl_s: 60 * Number(minutes.value), ...optional("name", name.value), ...optional("cache_salt", salt.value) } });
        return `Pin ${pin.name} holds ${count(pin.held_tokens)} of ${count(pin.tokens)} tokens now.`;
      });
    } }, h("label", { class: "field" }, "Text that prompts begin with", prompt), h("label", { class: "field" }, "Minutes", minutes),
    h("label", { class: "field" }, "Name (may be empty)", name), h("label", { class: "field" }, "Cache salt (may be empty)", salt), h("div", {}, go)));
  }

  #warmForm() {
    const prompts = h("textarea", { id: "warm-prompts", rows: 6, required: true });
    const salt = h("input", { id: "warm-salt", maxlength: 256 });
    const go = h("button", { type: "submit", class: "primary", text: "Prewarm…" });
    return panel("Prewarm prompts", { className: "span4" }, h("form", { class: "column", onsubmit: async (event) => {
      event.preventDefault();
      const lines = prompts.value.split("\n").filter((line) => line.trim());
      if (!(await confirm("Prewarm?", `${plural(lines.length, "prompt")} will be computed, at the lowest priority.`, "Prewarm"))) return;
      await this.#order(go, "Prewarming…", async () => {
        const report = await ask("/v1/cache/prewarm", { method: "POST", waitMs: LONG_MS, body: { prompts: lines.map((prompt) => ({ prompt, ...optional("cache_salt", salt.value) })) } });
        const tokens = report.data.reduce((sum, one) => sum + one.prompt_tokens, 0);
        const cached = report.data.reduce((sum, one) => sum + (one.prompt_tokens_details?.cached_tokens ?? 0), 0);
        return `${plural(report.data.length - report.failed, "prompt")} brought in, ${count(report.failed)} failed; ${percent(tokens ? cached / tokens : 0)} of ${count(tokens)} tokens had been cached before.`;
      });
    } }, h("label", { class: "field" }, "Prompts, one a line (64 at the most)", prompts), h("label", { class: "field" }, "Cache salt (may be empty)", salt), h("div", {}, go)));
  }

  #flushForm() {
    const boxes = TIERS.map(([tier, words]) => h("label", { class: "row" }, h("input", { type: "checkbox", id: `flush-${tier}`, value: tier, checked: tier === "device" || tier === "host" }), words));
    const salt = h("input", { id: "flush-salt", maxlength: 256 });
    const go = h("button", { type: "submit", class: "danger", text: "Flush…" });
    return panel("Empty tiers", { className: "span4" }, h("form", { class: "column", onsubmit: async (event) => {
      event.preventDefault();
      const tiers = boxes.map((box) => box.querySelector("input")).filter((box) => box.checked).map((box) => box.value);
      if (!tiers.length) { this.#say("Choose a tier to flush.", "bad"); return; }
      const whose = salt.value ? `of the salt “${salt.value}”` : "of every namespace";
      if (!(await confirm("Flush?", `All KV ${whose} that is not in use is dropped from: ${tiers.join(", ")}. It is computed again when a request needs it.`, "Flush"))) return;
      await this.#order(go, "Flushing…", async () => {
        const report = await ask("/v1/cache/flush", { method: "POST", waitMs: LONG_MS, body: { tiers, ...optional("cache_salt", salt.value) } });
        return `Dropped ${plural(report.device_pages, "device page")}, ${plural(report.host_pages, "host page")} and ${plural(report.disk_chunks, "chunk")} on disk.`;
      });
    } }, h("fieldset", { class: "column" }, h("legend", { text: "Tiers" }), boxes), h("label", { class: "field" }, "Cache salt (empty: all)", salt),
    h("p", { class: "quiet small", text: "Pages of running requests, pins and transfers stay." }), h("div", {}, go)));
  }

  async #unpin(name) {
    if (!(await confirm("Remove this pin?", `${name} may be evicted from then on.`, "Unpin"))) return;
    await this.#order(document.activeElement instanceof HTMLButtonElement ? document.activeElement : h("button"), "Unpinning…", async () => {
      await ask(`/v1/cache/pins/${encodeURIComponent(name)}`, { method: "DELETE" });
      return `${name} is removed.`;
    });
  }
}

const optional = (name, value) => (value ? { [name]: value } : {});
