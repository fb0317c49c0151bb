// The radix tree: loaded page by page, as a picture and as a table, with a search over both.

import { readAddress, writeAddress } from "./address.js";
import { ask } from "./api.js";
import { fill, h, legend, pager, panel, say } from "./dom.js";
import { Icicle } from "./icicle.js";
import { beginning, layOut, matches } from "./tree_model.js";
import { count, plural } from "./words.js";

const PAGE = 1024;
const MOST = 100000;
const ROWS = 50;
const AGAIN_MS = 10000; // A tree of this page's size or less is kept fresh; a larger one is asked for by hand.
const FRESH_NODES = 4 * PAGE;
const TIER_WORDS = { device: "device memory", host: "host memory", disk: "disk", hidden: "hidden states on disk" };

export class Tree {
  #place; #icicle; #said; #detail; #search; #rows; #picture; #colors; #nodes = []; #layout = layOut([]); #loading = null; #loadedAt = 0;
  #first = 0; #asTable = false; #listed = []; #turn = -1; #foundIds = null; #isCut = false; #asked = "";

  constructor(place, feed) {
    this.#place = place;
    const canvas = h("canvas", { tabindex: 0, role: "application", id: "icicle", "aria-label": "Radix tree as an icicle plot; the same as a table follows the button Table", "aria-describedby": "tree-picked" });
    this.#picture = h("div", { class: "icicle" }, canvas);
    this.#icicle = new Icicle(canvas);
    this.#icicle.addEventListener("pick", () => { this.#asked = ""; this.#write(); this.#drawPicked(); });
    this.#said = h("span", { class: "quiet small", role: "status", id: "tree-said" });
    this.#search = h("input", { type: "search", id: "tree-search", placeholder: "text, id, namespace or pin", "aria-label": "Search the tree", oninput: () => { this.#turn = -1; this.#first = 0; this.#find(); this.#write(); },
      onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); this.#nextFound(event.shiftKey ? -1 : 1); } } });
    this.#detail = h("div", { id: "tree-picked", "aria-live": "polite" });
    this.#rows = h("div", { hidden: true, id: "tree-table" });
    this.#colors = h("div", {});
    const colorBy = h("select", { id: "tree-colour", onchange: () => { this.#icicle.colorBy = colorBy.value; this.#drawLegend(); this.#icicle.draw(); } },
      h("option", { value: "hotness", text: "hotness (hits)" }), h("option", { value: "tier", text: "fastest tier" }));
    const asTable = h("button", { type: "button", id: "tree-as-table", "aria-pressed": "false", text: "Table", onclick: () => {
      this.#asTable = !this.#asTable;
      asTable.setAttribute("aria-pressed", String(this.#asTable));
      asTable.textContent = this.#asTable ? "Picture" : "Table";
      this.#picture.hidden = this.#asTable;
      this.#rows.hidden = !this.#asTable;
      this.#drawTable();
      if (!this.#asTable) this.#icicle.draw();
    } });
    const button = (text, name, go) => h("button", { type: "button", "aria-label": name, title: name, text, onclick: go });
    fill(place, h("div", { class: "tree-grid" },
      panel("Radix tree", { aside: this.#said },
        h("div", { class: "row" }, this.#search, h("label", { class: "row small" }, "colour", colorBy), asTable,
          button("+", "Zoom in", () => this.#icicle.zoom(0.7)), button("−", "Zoom out", () => this.#icicle.zoom(1 / 0.7)), button("Fit", "Show all of the tree", () => this.#icicle.fit()),
          h("button", { type: "button", id: "tree-refresh", text: "Refresh", onclick: () => this.load() })),
        this.#picture, this.#rows, this.#colors),
      panel("Chosen node", {}, this.#detail)));
    this.#drawLegend();
    this.#drawPicked();
    feed.addEventListener("cell", () => {
      if (this.#place.hidden || this.#loading || document.hidden) return;
      const isDue = performance.now() - this.#loadedAt > AGAIN_MS && this.#nodes.length <= FRESH_NODES;
      if (!this.#loadedAt || isDue) this.load();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#icicle.draw());
    addEventListener("theme", () => this.#icicle.draw());
  }

  /** As the address says, which may name a node and a search, or as it was left. */
  show(isFollowed) {
    if (isFollowed) {
      const { item, params } = readAddress();
      this.#search.value = params.get("q") ?? "";
      this.#turn = -1;
      this.#first = 0;
      if (this.#loadedAt) this.#find();
      this.#asked = item;
      if (!item) this.#icicle.pick(null);
      this.#pickAsked();
    }
    this.#write();
    this.#icicle.draw();
    if (!this.#loadedAt) this.load();
  }

  focusSearch() { this.#search.focus(); }

  /** What Export JSON saves. */
  data() { return { search: this.#search.value, nodes: this.#listed.map((box) => box.node) }; }

  #write() {
    if (this.#place.hidden) return;
    writeAddress("tree", this.#asked || String(this.#icicle.picked ?? ""), { q: this.#search.value });
  }

  /** Choose the node that the address asked for, once it is there. */
  #pickAsked() {
    const box = this.#asked && this.#layout.boxes.get(Number(this.#asked));
    if (!box) return;
    this.#icicle.zoomTo(box.node.id);
    this.#icicle.pick(box.node.id);
  }

  /** Ask for all nodes, page after page; what was shown stays until all are there. */
  async load() {
    this.#loading?.abort();
    const loading = (this.#loading = new AbortController());
    const isFirst = !this.#loadedAt;
    const nodes = [];
    try {
      let after = 0;
      while (after !== null && nodes.length < MOST) {
        const page = await ask(`/v1/cache?limit=${PAGE}${after ? `&after=${after}` : ""}`, { signal: loading.signal });
        for (const node of page.data) nodes.push(node);
        after = page.next_after;
        if (after !== null && (isFirst || nodes.length > FRESH_NODES)) this.#said.textContent = `${plural(nodes.length, "node")} so far…`;
      }
      const wasWhole = this.#layout.width;
      this.#nodes = nodes;
      this.#isCut = after !== null;
      this.#layout = layOut(nodes);
      this.#loadedAt = performance.now();
      this.#icicle.show(this.#layout, !isFirst && wasWhole > 0 && this.#layout.width === wasWhole);
      this.#find();
      this.#pickAsked();
      this.#drawPicked();
    } catch (error) {
      if (loading.signal.aborted) return;
      say(this.#said, error.message);
      this.#loadedAt = performance.now();
    } finally {
      if (this.#loading === loading) this.#loading = null;
    }
  }

  #find() {
    const wanted = this.#search.value.trim();
    this.#listed = wanted ? this.#layout.order.filter((box) => matches(box.node, wanted)) : this.#layout.order;
    this.#foundIds = wanted ? new Set(this.#listed.map((box) => box.node.id)) : null;
    this.#icicle.found = this.#foundIds;
    this.#turn = Math.min(this.#turn, this.#listed.length - 1);
    this.#first = Math.min(this.#first, ROWS * Math.floor(Math.max(0, this.#listed.length - 1) / ROWS));
    const all = plural(this.#nodes.length, "node");
    const tokens = this.#nodes.reduce((sum, node) => sum + node.tokens, 0);
    const cut = this.#isCut ? `; only the oldest are shown` : "";
    say(this.#said, wanted ? `${count(this.#listed.length)} of ${all} found; Enter goes to the next` : this.#loadedAt ? `${all}, ${plural(tokens, "token")}, ${plural(this.#layout.roots.length, "namespace")}${cut}` : "");
    this.#icicle.draw();
    this.#drawTable();
  }

  #nextFound(step) {
    if (!this.#foundIds?.size) return;
    const from = this.#turn < 0 && step < 0 ? 0 : this.#turn;
    this.#turn = (from + step + this.#listed.length) % this.#listed.length;
    const box = this.#listed[this.#turn];
    this.#icicle.zoomTo(box.node.id);
    this.#icicle.pick(box.node.id);
    this.#first = Math.floor(this.#turn / ROWS) * ROWS;
    this.#drawTable();
  }

  #drawLegend() {
    fill(this.#colors, this.#icicle.colorBy === "tier" ? legend(["device", "host", "disk", "hidden"], (tier) => TIER_WORDS[tier])
      : h("div", { class: "row" }, legend(["cold", "tepid", "warm", "hot"], (name) => ({ cold: "never hit", tepid: "once", warm: "at times", hot: "the most hits" })[name]),
        h("span", { class: "quiet small", text: "stripe on the left:" }), legend(["device", "host", "disk"], (tier) => TIER_WORDS[tier])),
    h("p", { class: "quiet small narrow-hide", text: "Downwards: tokens of the prompt. Across: one column for each path. Drag to move, wheel to zoom (with Shift only across), double click to zoom to a node; a dot marks what is pinned." }));
  }

  #drawPicked() {
    const box = this.#layout.boxes.get(this.#icicle.picked);
    if (!box) {
      this.#detail.dataset.told = "";
      fill(this.#detail, h("p", { class: "quiet", text: this.#asked && this.#loadedAt ? `Node ${this.#asked} is not in the tree any more.` : "Choose a node: click it, or use the arrow keys in the picture." }));
      return;
    }
    const { node } = box;
    const held = (pools, unit) => Object.entries(pools).map(([owner, number]) => `${owner}: ${plural(number, unit)}`).join(", ") || "–";
    const facts = [["node", String(node.id)], ["begins with", beginning(node)], ["tokens", `${count(node.depth)} to ${count(node.depth + node.tokens)}`],
      ["hits", count(node.hits)], ["paths through it", count(box.leaves)], ["device", held(node.device, "page")], ["host", held(node.host, "page")],
      ["disk", held(node.disk, "chunk")], ["hidden states", held(node.hidden, "chunk")], ["pins", node.pins.join(", ") || "–"], ["namespace", node.namespace]];
    const told = JSON.stringify(facts);
    if (this.#detail.dataset.told === told) return; // A screen reader reads out what is written.
    this.#detail.dataset.told = told;
    fill(this.#detail, h("dl", { class: "facts" }, facts.flatMap(([what, value]) => [h("dt", { text: what }), h("dd", { class: what === "namespace" ? "mono" : null, text: value })])));
  }

  #drawTable() {
    if (!this.#asTable) return;
    const shown = this.#listed.slice(this.#first, this.#first + ROWS);
    const sum = (pools) => Object.values(pools).reduce((total, held) => total + held, 0) || "–";
    const columns = [["node", 0], ["level", 1], ["depth", 1], ["tokens", 1], ["hits", 1], ["device pages", 1], ["host pages", 1], ["disk chunks", 1], ["begins with", 0]];
    fill(this.#rows, h("div", { class: "scroll" }, h("table", {},
      h("caption", { class: "only-read", text: "Nodes of the radix tree, each parent before its children" }),
      h("thead", {}, h("tr", {}, columns.map(([name, isNumber]) => h("th", { scope: "col", class: isNumber ? "num" : null, text: name })))),
      h("tbody", {}, shown.map(({ node, level }) => h("tr", { class: "pick", "aria-current": String(node.id === this.#icicle.picked), onclick: () => { this.#icicle.pick(node.id); this.#drawTable(); } },
        h("td", {}, h("button", { type: "button", class: "plain", id: `node-${node.id}`, text: String(node.id) })),
        [level, node.depth, node.tokens, node.hits, sum(node.device), sum(node.host), sum(node.disk)].map((value) => h("td", { class: "num", text: typeof value === "number" ? count(value) : value })),
        h("td", { class: "one-line", text: [node.pins.length ? `[pinned: ${node.pins.join(", ")}]` : "", beginning(node)].join(" ").trim().slice(0, 60) })))))),
    pager("tree", this.#first, ROWS, this.#listed.length, (first) => { this.#first = first; this.#drawTable(); }));
  }
}
