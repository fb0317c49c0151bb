// What the address says: `#view/item?name=value`. Every view, request and node can be linked to.

const parts = () => {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [view, ...item] = path.split("/");
  return { view, item: decoded(item.join("/")), params: new URLSearchParams(query) };
};

function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

/** The view, the item within it ("" for none) and the parameters that the address names. */
export const readAddress = parts;

/** Write the address. `params` that are empty are left out; `push`: Back leads to the one before. */
export function writeAddress(view, item = "", params = {}, { push = false } = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value)).toString();
  const hash = `#${view}${item ? `/${encodeURIComponent(item)}` : ""}${query ? `?${query}` : ""}`;
  if (location.hash === hash) return;
  window.history[push ? "pushState" : "replaceState"](null, "", hash);
}
