// Save what a view shows as a JSON file.

/** Offer `data` as a file. `name` says what it is; the moment is added. */
export function saveJson(name, data) {
  const moment = new Date().toISOString().slice(0, 19).replaceAll(":", "");
  const address = URL.createObjectURL(new Blob([JSON.stringify(data, null, 2)], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `thermocline-${name}-${moment}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
