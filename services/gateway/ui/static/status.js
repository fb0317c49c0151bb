// What is wrong, and with which process: from the link to the gateway, what it says, and what processes lack. Pure.

const LINKS = {
  connecting: ["connecting", ""],
  gone: ["gateway away", "The page shows the latest data and tries again by itself."],
  busy: ["gateway busy", "The page shows the latest data and tries again by itself."],
  locked: ["key needed", "Give the admin key to continue."],
  off: ["administration off", "Start the gateway with an admin key to see the cell. The chat works without one."],
  broker_away: ["broker away", "The gateway answers, but has no broker and so no scheduler. The page shows old data, and continues by itself."],
  scheduler_away: ["scheduler away", "The gateway answers, but the scheduler does not. The page shows old data, and continues by itself."],
};

/**
 * The state of a `link` {state, message, code}: `word` for the head of the page, and `said`, a whole text for a banner, ""
 * where the link is well.
 */
export function linkStatus({ state, message, code }) {
  const [word, advice] = LINKS[state === "away" ? (code in LINKS ? code : "scheduler_away") : state] ?? ["live", ""];
  // Messages of the API are parts of a sentence; here they stand as one.
  const said = message && `${message[0].toUpperCase()}${message.slice(1)}${/[.!?]$/.test(message) ? "" : "."}`;
  return { word, said: state === "live" || state === "connecting" ? "" : `${said} ${advice}`.trim() };
}

const MOST_FAULTS = 10;

/** What a list of faults says: one sentence each, and how many more there are beyond ten. */
export function faultsSaid(faults) {
  const said = faults.slice(0, MOST_FAULTS).map((fault) => fault.said);
  const more = faults.length - said.length;
  return more ? [...said, `and ${more.toLocaleString("en")} more; Export JSON in the overview has all of them`] : said;
}

/** Faults of a cell that is heard, the worst first: {level: "bad" | "warn", word, said}. */
export function cellFaults(cell, storages) {
  const faults = [];
  if (!cell.workers.length) faults.push({ level: "bad", word: "no worker", said: "No worker has joined: nothing can be computed." });
  else if (cell.workers.every((worker) => worker.draining)) faults.push({ level: "bad", word: "workers leaving", said: "Every worker is about to leave: requests wait." });
  for (const name of cell.storages) {
    if (storages[name] === null) faults.push({ level: "bad", word: `${name} silent`, said: `${name}, storage: it does not answer` });
  }
  for (const { component, what, reason, setting } of cell.degraded ?? []) {
    faults.push({ level: "warn", word: `${component} degraded`, said: `${component}, ${what}: ${reason}${setting ? ` (${setting})` : ""}` });
  }
  return faults;
}
