// Makes elements. Text is only ever set as text: names from pods are whatever a pod's author wrote.

/**
 * Make an element. `attributes` may hold `class`, `text`, `data` (an object) and any attribute; null leaves one out.
 */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") made.textContent = value;
    else if (key === "data") Object.assign(made.dataset, value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Set an element's text, if it is another one: a screen reader reads what is set anew. */
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Set or remove an attribute, if it is another one. */
export function mark(target, name, value) {
  if (value === null || value === false) target.removeAttribute(name);
  else if (target.getAttribute(name) !== String(value)) target.setAttribute(name, String(value));
}

/** Find an element of the page. */
export function byId(id) {
  return document.getElementById(id);
}
