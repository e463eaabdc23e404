// The states of a device: each has a word and a shape of its own, and a colour of the Okabe-Ito palette (page.css).

export const STATES = {
  free: "free",
  granted: "granted or claimed",
  attached: "in a pod's network",
  moving: "on its way in or out",
  unhealthy: "unhealthy",
  quarantined: "in quarantine",
  idle: "not offered",
};

const WORST = ["quarantined", "unhealthy", "moving", "attached", "granted", "free", "idle"];

const RESTING = new Set(["granted", "prepared", "attached"]);

/** Judge a device from what is known of it. Words of the document never become class names. */
export function stateOf(known) {
  if (known.quarantine) return "quarantined";
  if (known.offers.some((offer) => offer.healthy < offer.units)) return "unhealthy";
  if (known.held.some((row) => !RESTING.has(row.state))) return "moving";
  if (known.held.some((row) => row.state === "attached")) return "attached";
  if (known.held.length) return "granted";
  return known.offers.length ? "free" : "idle";
}

/** Count states, the ones that matter most first: `3 attached, 5 free`. */
export function counted(states) {
  const counts = new Map();
  for (const state of states) counts.set(state, (counts.get(state) ?? 0) + 1);
  return WORST.filter((state) => counts.has(state)).map((state) => `${counts.get(state)} ${state}`).join(", ");
}
