// Elements without markup: everything that comes from the API is set as text, so it can never become HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `given` are properties (class, text, on*, data*, aria-*); children are nodes, strings or null. */
export function h(name, given = {}, ...children) {
  return dressed(document.createElement(name), given, children);
}

/** The same for SVG. */
export function svg(name, given = {}, ...children) {
  return dressed(document.createElementNS(SVG, name), given, children);
}

function dressed(element, given, children) {
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "text") element.textContent = value;
    else if (key === "value") element.value = value;
    else if (key === "style") for (const [name, what] of Object.entries(value)) element.style.setProperty(name, what);
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replace what is in `place`, but keep the focus on the element with the same id, and wide tables as they were scrolled and focused. */
export function fill(place, ...children) {
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  const boxes = () => [...place.querySelectorAll(".scroll")].map((box) => [box.querySelector("caption")?.textContent, box]);
  const before = new Map(boxes().map(([name, box]) => [name, { left: box.scrollLeft, isFocused: box === focused }]));
  place.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  if (focused?.id) document.getElementById(focused.id)?.focus({ preventScroll: true });
  for (const [name, box] of before.size ? boxes() : []) {
    const { left = 0, isFocused = false } = before.get(name) ?? {};
    if (left) box.scrollLeft = left;
    if (isFocused) box.focus({ preventScroll: true });
  }
}

/** Write `words` where they are others than before: a screen reader reads out what is written, the same words too. */
export function say(place, words) {
  if (place.textContent !== words) place.textContent = words;
}

/** Whether a person marks text in `place`, which would be lost if it were drawn anew. */
export function isBeingSelected(place) {
  const selection = getSelection();
  return selection !== null && !selection.isCollapsed && place.contains(selection.anchorNode);
}

/** A panel with a heading; `aside` stands beside the heading. */
export function panel(title, { className = "", aside = null, id = null } = {}, ...children) {
  return h("section", { class: `panel ${className}`, "aria-label": title, id }, h("header", {}, h("h2", { text: title }), aside), ...children);
}

/** A table whose columns are [heading, isNumber]; rows are lists of cells (nodes or text). */
export function table(caption, columns, rows) {
  const cell = (content, column) =>
    h("td", { class: columns[column][1] ? "num" : null }, content instanceof Node ? content : String(content));
  return h("div", { class: "scroll" },
    h("table", {},
      h("caption", { class: "only-read", text: caption }),
      h("thead", {}, h("tr", {}, columns.map(([name, isNumber]) => h("th", { scope: "col", class: isNumber ? "num" : null, text: name })))),
      h("tbody", {}, rows.map((row) => (row instanceof Node ? row : h("tr", {}, row.map(cell)))))));
}

/** Buttons through a long list: rows from `first` on of `all` are shown, `go` is given another first one. */
export function pager(name, first, rows, all, go) {
  const button = (what, to, isOff) => h("button", { type: "button", id: `${name}-${what.toLowerCase()}`, text: what, disabled: isOff, onclick: () => go(to) });
  return h("div", { class: "row" }, button("Previous", first - rows, first === 0), button("Next", first + rows, first + rows >= all),
    h("span", { class: "quiet small", text: all ? `${first + 1} to ${Math.min(first + rows, all)} of ${all.toLocaleString("en")}` : "none" }));
}

/** A list of colours and what they stand for. */
export function legend(names, wordOf = (name) => name) {
  return h("ul", { class: "legend" }, names.map((name) => h("li", {}, h("span", { class: `swatch c-${name}` }), wordOf(name))));
}
