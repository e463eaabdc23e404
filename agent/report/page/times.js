// Time spans in their largest unit, measured by the agent's clock.

let ahead = 0; // seconds that the agent's clock is ahead of ours

/** Take over the agent's clock from a Date header, in which seconds are whole. */
export function setClock(header, now = Date.now()) {
  const told = Date.parse(header ?? "");
  if (Number.isNaN(told)) return;
  const difference = (told - now) / 1000;
  if (Math.abs(difference - ahead) > 2) ahead = difference;
}

/** Tell how long ago a moment (seconds since the epoch) was: 45s, 12m, 5h, 3d. */
export function ago(at, now = Date.now()) {
  const seconds = Math.max(0, now / 1000 + ahead - at);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["m", 60]])
    if (seconds >= size) return `${Math.floor(seconds / size)}${unit}`;
  return `${Math.floor(seconds)}s`;
}

/** Write a moment out, in the reader's own time zone. */
export function moment(at) {
  return new Date(at * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

/** Bring all times of the page up to date. */
export function tick(root = document) {
  for (const shown of root.querySelectorAll("time[data-at]")) {
    const text = ago(Number(shown.dataset.at));
    if (shown.textContent !== text) shown.textContent = text;
  }
}
