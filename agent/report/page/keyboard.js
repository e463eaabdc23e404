// One tab stop for the whole tree, arrow keys inside (WAI-ARIA tree pattern). VFs lie in rows: there the arrows go where
// they point.

const ITEM = "[role=treeitem]";

/** Let the keyboard walk a tree. */
export function walk(root) {
  root.addEventListener("keydown", (event) => {
    const from = event.target.closest?.(ITEM);
    if (!from || event.altKey || event.ctrlKey || event.metaKey) return;
    const to = target(root, from, event.key);
    if (!to) return;
    event.preventDefault();
    move(root, to);
  });
  root.addEventListener("click", (event) => {
    const item = event.target.closest(ITEM);
    if (item) move(root, item);
  });
}

/** Make an item the tree's tab stop and focus it. */
export function move(root, item) {
  for (const former of root.querySelectorAll(`${ITEM}[tabindex="0"]`)) former.tabIndex = -1;
  item.tabIndex = 0;
  item.focus();
}

function target(root, from, key) {
  const isCell = from.classList.contains("cell");
  const items = () => [...root.querySelectorAll(ITEM)].filter((item) => item.checkVisibility());
  const next = (step, among = items()) => among[among.indexOf(from) + step];
  const parent = () => from.parentElement.closest(ITEM);
  switch (key) {
    case "Home": return items()[0];
    case "End": return items().at(-1);
    case "ArrowDown": return isCell ? below(from, 1) ?? beyond(items(), from) : next(1);
    case "ArrowUp": return isCell ? below(from, -1) ?? parent() : next(-1);
    case "ArrowLeft":
      if (isCell) return from.previousElementSibling ?? parent();
      if (from.getAttribute("aria-expanded") === "true" && from.classList.contains("nic")) return fold(from, "false");
      return parent();
    case "ArrowRight":
      if (isCell) return from.nextElementSibling;
      if (from.getAttribute("aria-expanded") === "false") return fold(from, "true");
      return from.querySelector(ITEM);
    default: return null;
  }
}

function fold(item, expanded) {
  item.setAttribute("aria-expanded", expanded);
  return item;
}

/** The cell in the next row (or the one before), nearest to being straight below. */
function below(cell, direction) {
  const row = cell.offsetTop;
  const rows = [...cell.parentElement.children].filter((other) => Math.sign(other.offsetTop - row) === direction);
  if (!rows.length) return null;
  const next = rows[direction > 0 ? 0 : rows.length - 1].offsetTop;
  const distance = (other) => Math.abs(other.offsetLeft - cell.offsetLeft);
  const nearer = (best, other) => (distance(other) < distance(best) ? other : best);
  return rows.filter((other) => other.offsetTop === next).reduce(nearer);
}

/** The first item after all cells of this one's group. */
function beyond(items, cell) {
  return items[items.indexOf(cell.parentElement.lastElementChild) + 1];
}
