// Short texts that the browser keeps. Where it keeps none, as with all cookies blocked, the page remembers them until a reload.

const remembered = new Map();

/** The text of this name in an `area` ("localStorage" or "sessionStorage"), "" for none. */
export function kept(area, name) {
  try { return remembered.get(name) ?? window[area].getItem(name) ?? ""; } catch { return ""; }
}

/** Keep a text; "" removes it. */
export function keep(area, name, text) {
  remembered.set(name, text);
  try {
    if (text) window[area].setItem(name, text);
    else window[area].removeItem(name);
  } catch { /* It is remembered here alone. */ }
}
