// Dialogs: the browser's own, so that focus stays inside and Escape closes them.

import { fill, h } from "./dom.js";

/** A dialog with a heading; `build(close)` gives its body. Resolves with what `close` was given, null for Escape. */
export function dialog(title, build) {
  return new Promise((resolve) => {
    let answer = null;
    const box = h("dialog", { "aria-label": title });
    const close = (value) => { answer = value ?? null; box.close(); };
    fill(box, h("div", { class: "column" }, h("h2", { text: title }), build(close)));
    box.addEventListener("close", () => { box.remove(); resolve(answer); });
    document.body.append(box);
    box.showModal();
  });
}

/** Whether a person says yes to what cannot be taken back. */
export function confirm(title, words, doIt) {
  return dialog(title, (close) => h("div", { class: "column" }, h("p", { text: words }), h("div", { class: "row" },
    h("button", { type: "button", class: "danger", id: "confirm-yes", text: doIt, onclick: () => close(true) }),
    h("button", { type: "button", autofocus: true, text: "Cancel", onclick: () => close(false) }))));
}

/** Ask for the keys. Resolves with {admin, api}, or null. */
export function askKeys(admin, api, why) {
  return dialog("Keys", (close) => {
    const adminField = h("input", { type: "password", id: "admin-key", autocomplete: "off", value: admin, autofocus: true });
    const apiField = h("input", { type: "password", id: "api-key", autocomplete: "off", value: api });
    return h("form", { onsubmit: (event) => { event.preventDefault(); close({ admin: adminField.value.trim(), api: apiField.value.trim() }); } },
      why ? h("p", { class: "bad", text: why }) : null,
      h("label", { class: "field" }, "Admin key", adminField, h("span", { class: "quiet small", text: "the gateway's --admin-key, with which this page shows the cell and changes the cache. Where `thermocline up` drew it, `thermocline top --link` prints a link that opens this page" })),
      h("label", { class: "field" }, "API key", apiField, h("span", { class: "quiet small", text: "for the chat, where the gateway has --api-keys; otherwise leave it empty" })),
      h("p", { class: "quiet small", text: "Both are kept in this tab until it closes, and are sent only to this gateway." }),
      h("div", { class: "row" }, h("button", { type: "submit", class: "primary", text: "Use these" }),
        h("button", { type: "button", text: "Cancel", onclick: () => close(null) })));
  });
}

/** The list of shortcuts. */
export function showHelp(shortcuts) {
  return dialog("Keyboard shortcuts", (close) => h("div", { class: "column" },
    h("dl", { class: "facts" }, shortcuts.flatMap(([keys, what]) => [h("dt", {}, h("kbd", { text: keys })), h("dd", { text: what })])),
    h("div", { class: "row" }, h("button", { type: "button", autofocus: true, text: "Close", onclick: () => close(null) }))));
}
