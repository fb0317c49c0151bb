// Puts the page together: views and tabs, the connection's state, keys, colour scheme and shortcuts.

import { readAddress } from "./address.js";
import { ask, keys } from "./api.js";
import { Chat } from "./chat.js";
import { askKeys, showHelp } from "./dialogs.js";
import { fill, h, say } from "./dom.js";
import { saveJson } from "./export.js";
import { Feed } from "./feed.js";
import { History } from "./history.js";
import { keep, kept } from "./kept.js";
import { Manage } from "./manage.js";
import { Overview } from "./overview.js";
import { Requests } from "./requests.js";
import { cellFaults, faultsSaid, linkStatus } from "./status.js";
import { Tree } from "./tree.js";

const NAMES = ["overview", "tree", "requests", "chat", "cache"];
const SHORTCUTS = [["1 … 5", "views: overview, tree, requests, chat, manage"], ["/", "search requests, or the tree"], ["e", "export what the view shows as JSON"], ["k", "keys"],
  ["d", "light, dark or as the system"], ["?", "this list"], ["Esc", "close a dialog"], ["← → in the tabs", "the view beside"], ["↑ ↓ ← → in the tree", "parent, child, siblings"],
  ["Shift + arrows in the tree", "move the picture"], ["+ − 0 in the tree", "zoom in, out, show all"], ["Enter in the tree", "zoom to the chosen node"],
  ["Enter in the tree's search", "next node that was found"], ["Enter, Shift + Enter in the chat", "send, break the line"]];

const byId = (id) => document.getElementById(id);
const place = (name) => byId(`view-${name}`);

const feed = new Feed();
const history_ = new History();
const views = {
  overview: new Overview(place("overview"), feed, history_), tree: new Tree(place("tree"), feed), requests: new Requests(place("requests"), feed),
  chat: new Chat(place("chat")), cache: new Manage(place("cache"), feed),
};

feed.addEventListener("cell", () => {
  history_.addCell(feed.cell, feed.storages, feed.nowMs());
  const [model = `model ${feed.cell.model.slice(0, 12)}`] = feed.cell.models ?? [];
  byId("model").textContent = model;
  byId("model").title = `${(feed.cell.models ?? []).join(", ")} (${feed.cell.model})`;
  document.title = `${model} – Thermocline`;
});
feed.addEventListener("requests", () => history_.addRequests(feed.requests, feed.nowMs()));
for (const name of ["link", "cell", "slow"]) feed.addEventListener(name, showStatus);

/** What is wrong: one or two words at the top, whole sentences in the banners. Each is written anew only when it changes, because a
 * screen reader reads it out then. */
function showStatus() {
  const { word, said } = linkStatus(feed.link);
  const faults = feed.isLive && feed.cell ? cellFaults(feed.cell, feed.storages) : [];
  const link = byId("link");
  link.dataset.state = feed.link.state;
  link.dataset.level = faults[0]?.level ?? "";
  const words = faults[0]?.word ?? word;
  say(link, words);
  const { state } = feed.link;
  tell(byId("banner"), said && [said, word], () => [h("strong", { text: `${word[0].toUpperCase()}${word.slice(1)}. ` }), h("span", { text: said }),
    state === "locked" ? h("button", { type: "button", class: "primary", text: "Give the key", onclick: () => giveKeys() }) : null,
    ["off", "gone", "busy"].includes(state) ? h("button", { type: "button", text: "Try now", onclick: () => feed.start() }) : null]);
  tell(byId("degraded"), faults.length ? faultsSaid(faults) : "", () => [h("strong", { text: "Degraded." }),
    h("ul", {}, faultsSaid(faults).map((text) => h("li", { text })))]);
  byId("degraded").dataset.level = faults[0]?.level ?? "";
}

function tell(banner, words, build) {
  const told = words ? JSON.stringify(words) : "";
  if ((banner.dataset.words ?? "") === told) return;
  banner.dataset.words = told;
  fill(banner, ...(told ? build() : []));
  banner.hidden = !told;
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

/** Show a view; `isFollowed`: as the address says, and not as it was left. */
function open(name, { focus = false, isFollowed = false } = {}) {
  for (const other of NAMES) {
    const isIt = other === name;
    const tab = byId(`tab-${other}`);
    tab.setAttribute("aria-selected", String(isIt));
    tab.tabIndex = isIt ? 0 : -1;
    place(other).hidden = !isIt;
    if (isIt && focus) tab.focus();
  }
  views[name].show(isFollowed);
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
  keep("localStorage", "thermocline.theme", theme);
  dispatchEvent(new Event("theme"));
}

const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(kept("localStorage", "thermocline.theme")) + 1) % THEMES.length]);

byId("theme").addEventListener("click", nextTheme);
document.querySelector(".skip").addEventListener("click", (event) => { // Without its fragment: the address names the view.
  event.preventDefault();
  byId("main").focus();
});
byId("keys").addEventListener("click", () => giveKeys());
byId("export").addEventListener("click", () => exportView());
byId("help").addEventListener("click", () => showHelp(SHORTCUTS));

const exportView = () => saveJson(current(), { view: current(), address: location.href, exported_ms: Date.now(), ...views[current()].data() });

addEventListener("hashchange", async () => { if (!(await takeLink())) follow(); });

/** Show what the address names. */
function follow() {
  const { view } = readAddress();
  if (NAMES.includes(view)) open(view, { isFollowed: true });
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
  const place = "12345".indexOf(event.key);
  if (place >= 0) open(NAMES[place], { focus: true });
  else if (event.key === "?") showHelp(SHORTCUTS);
  else if (event.key === "k") giveKeys();
  else if (event.key === "d") nextTheme();
  else if (event.key === "e") exportView();
  else if (event.key === "/") {
    const searched = current() === "requests" ? "requests" : "tree";
    open(searched);
    views[searched].focusSearch();
  }
  else return;
  event.preventDefault();
});

/** `thermocline up` prints a link whose fragment, which browsers send to no server, has a code that is exchanged for the admin key
 * once. The key is kept like one that was typed in, and the code is taken out of the address. Whether there was a link. */
async function takeLink() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (!given.has("once") && !given.has("key")) return false;
  window.history.replaceState(null, "", `${location.pathname}#${current() ?? "overview"}`);
  document.querySelector("dialog")?.close(); // It asked for the key.
  try {
    const key = given.get("key") ?? (await ask("/ui/key", { method: "POST", body: { code: given.get("once") } })).admin_key;
    keys.set(key, keys.api);
  } catch (error) {
    if (!keys.admin) feed.lock(error.message);
  }
  if (keys.admin) feed.start();
  return true;
}

const stored = kept("localStorage", "thermocline.theme");
setTheme(THEMES.includes(stored) ? stored : "system");
const wasLinked = await takeLink();
if (NAMES.includes(readAddress().view)) follow();
else open("overview");
if (!wasLinked && keys.admin) feed.start();
else if (!wasLinked) {
  feed.lock("This page shows the cell to its operators.");
  giveKeys();
}
