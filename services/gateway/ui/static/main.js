// Puts the page together: views and tabs, the connection's state, keys, colour scheme and shortcuts.

import { keys } from "./api.js";
import { Chat } from "./chat.js";
import { askKeys, showHelp } from "./dialogs.js";
import { fill, h } from "./dom.js";
import { Feed } from "./feed.js";
import { History } from "./history.js";
import { Manage } from "./manage.js";
import { Overview } from "./overview.js";
import { Requests } from "./requests.js";
import { Tree } from "./tree.js";

const NAMES = ["overview", "tree", "requests", "chat", "cache"];
const SHORTCUTS = [["1 … 5", "views: overview, tree, requests, chat, manage"], ["/", "search the tree"], ["k", "keys"], ["d", "light, dark or as the system"],
  ["?", "this list"], ["Esc", "close a dialog"], ["← → in the tabs", "the view beside"], ["↑ ↓ ← → in the tree", "parent, child, siblings"],
  ["Shift + arrows in the tree", "move the picture"], ["+ − 0 in the tree", "zoom in, out, show all"], ["Enter in the tree", "zoom to the chosen node"],
  ["Enter in the search", "next node that was found"], ["Ctrl + Enter in the chat", "send"]];
const LINK_WORDS = { connecting: "connecting", live: "live", gone: "disconnected", locked: "key needed", off: "administration off", away: "scheduler away" };
const ADVICE = {
  gone: "What is shown is the last that was heard; the page tries again by itself.", locked: "Give the admin key to go on.",
  off: "Start the gateway with an admin key to see the cell. The chat works without one.",
  away: "The gateway is there, but the scheduler is silent; the page goes on as soon as it is heard. What is shown is old.",
};

const byId = (id) => document.getElementById(id);
const place = (name) => byId(`view-${name}`);

const feed = new Feed();
const history_ = new History();
const views = {
  overview: new Overview(place("overview"), feed, history_), tree: new Tree(place("tree"), feed), requests: new Requests(place("requests"), feed),
  chat: new Chat(place("chat")), cache: new Manage(place("cache"), feed),
};

feed.addEventListener("cell", () => {
  showDegraded(feed.cell.degraded ?? []);
  history_.addCell(feed.cell, Date.now());
  byId("model").textContent = `${feed.cell.workers.length} × worker, model ${feed.cell.model.slice(0, 12)}`;
});
feed.addEventListener("requests", () => history_.addRequests(feed.requests));
feed.addEventListener("link", ({ detail }) => showLink(detail));

function showLink({ state, message }) {
  const link = byId("link");
  if (link.dataset.state !== state) {
    link.dataset.state = state;
    link.textContent = LINK_WORDS[state];
  }
  const banner = byId("banner");
  if (state === "live" || state === "connecting") {
    banner.hidden = true;
    return;
  }
  // Messages of the API are parts of a sentence; here they stand as one.
  const said = message && `${message[0].toUpperCase()}${message.slice(1)}${/[.!?]$/.test(message) ? "" : "."}`;
  const words = `${said} ${ADVICE[state]}`.trim();
  // Told once: an alert that is written anew is read out anew.
  if (banner.hidden || banner.dataset.words !== words) {
    banner.dataset.words = words;
    fill(banner, h("strong", { text: `${LINK_WORDS[state][0].toUpperCase()}${LINK_WORDS[state].slice(1)}. ` }), h("span", { text: words }),
      state === "locked" ? h("button", { type: "button", class: "primary", text: "Give the key", onclick: () => giveKeys() }) : null,
      state === "off" || state === "gone" ? h("button", { type: "button", text: "Try now", onclick: () => feed.start() }) : null);
    banner.hidden = false;
  }
}

let shownDegraded = "";

/** What the cell was asked for and does not have, until it has it. */
function showDegraded(degraded) {
  const lines = degraded.map(({ component, what, reason, setting }) => `${component}, ${what}: ${reason}${setting ? ` (${setting})` : ""}`);
  // Written anew only when it changes, because a screen reader reads it out then.
  if (lines.join("\n") === shownDegraded) return;
  shownDegraded = lines.join("\n");
  fill(byId("degraded"), h("strong", { text: "Degraded." }), h("ul", {}, lines.map((line) => h("li", { text: line }))));
  byId("degraded").hidden = lines.length === 0;
}

let isAsking = false;

async function giveKeys(why = "") {
  if (isAsking) return;
  isAsking = true;
  try {
    const given = await askKeys(keys.admin, keys.api, why);
    if (given) {
      keys.set(given.admin, given.api);
      feed.start();
    }
  } finally {
    isAsking = false;
  }
}

function open(name, { focus = false } = {}) {
  for (const other of NAMES) {
    const isIt = other === name;
    const tab = byId(`tab-${other}`);
    tab.setAttribute("aria-selected", String(isIt));
    tab.tabIndex = isIt ? 0 : -1;
    place(other).hidden = !isIt;
    if (isIt && focus) tab.focus();
  }
  if (location.hash !== `#${name}`) window.history.replaceState(null, "", `#${name}`);
  views[name].show();
}

const current = () => NAMES.find((name) => !place(name).hidden);

for (const name of NAMES) {
  byId(`tab-${name}`).addEventListener("click", () => open(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? NAMES.length - 1 : step && (NAMES.indexOf(name) + step + NAMES.length) % NAMES.length;
    if (to === undefined) return;
    event.preventDefault();
    open(NAMES[to], { focus: true });
  });
}

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-label", `Colour scheme: ${theme === "system" ? "as the system" : theme}`);
  byId("theme").title = byId("theme").getAttribute("aria-label");
  byId("theme").textContent = { system: "◐", light: "☀", dark: "☾" }[theme];
  localStorage.setItem("thermocline.theme", theme);
  dispatchEvent(new Event("theme"));
}

const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("thermocline.theme") ?? "system") + 1) % THEMES.length]);

byId("theme").addEventListener("click", nextTheme);
byId("keys").addEventListener("click", () => giveKeys());
byId("help").addEventListener("click", () => showHelp(SHORTCUTS));
addEventListener("hashchange", () => {
  if (takeKey()) {
    document.querySelector("dialog")?.close(); // It asked for the key.
    feed.start();
    return;
  }
  const name = location.hash.slice(1);
  if (NAMES.includes(name) && name !== current()) open(name);
});

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
  const place = "12345".indexOf(event.key);
  if (place >= 0) open(NAMES[place], { focus: true });
  else if (event.key === "?") showHelp(SHORTCUTS);
  else if (event.key === "k") giveKeys();
  else if (event.key === "d") nextTheme();
  else if (event.key === "/") { open("tree"); views.tree.focusSearch(); }
  else return;
  event.preventDefault();
});

/** `thermocline up` prints a link with the admin key in its fragment, which a browser sends to no server. It is kept like a key
 * that was typed in, and taken out of the address, and so of the history. Whether there was one. */
function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return false;
  keys.set(key, keys.api);
  window.history.replaceState(null, "", `${location.pathname}#${current() ?? "overview"}`);
  return true;
}

takeKey();
const stored = localStorage.getItem("thermocline.theme");
setTheme(THEMES.includes(stored) ? stored : "system");
open(NAMES.includes(location.hash.slice(1)) ? location.hash.slice(1) : "overview");
if (keys.admin) feed.start();
else {
  showLink({ state: "locked", message: "This page shows the cell to its operators." });
  giveKeys();
}
