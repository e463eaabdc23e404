// The tables: resources, rails, slots, who holds what, what is wrong, recent events.

import { since } from "./details.js";
import { byId, element, mark, say } from "./dom.js";
import { STATES, stateOf, tally } from "./states.js";
import { tick } from "./times.js";

const MOST_ROWS = 200;
const shown = new Map(); // id → what it was made from: equal rows are left alone

/** Explain the shapes. */
export function showLegend() {
  byId("legend").replaceChildren(...Object.entries(STATES).map(([state, text]) =>
    element("li", {}, element("span", { class: "glyph", "aria-hidden": "true", data: { state } }), text)));
}

/** Show all tables; `filter` tells whether a row is looked for, or is null. Returns how many rows are. */
export function showLists(model, filter) {
  const { document } = model;
  showResources(document.resources ?? []);
  mark(byId("slots-section"), "hidden", document.slots?.length ? null : "");
  return [
    table("rails", ["GPU", "Near", "NIC", "VFs"], railsOf(model), filter, "No GPU is known."),
    table("slots", ["Resource", "NUMA", "Slots", "Healthy", "Granted", "Bound"], slotsOf(document), filter, "None."),
    table("held", ["Device", "Resource", "Pod", "Interface", "Address", "State", "For"], heldOf(model), filter, "Nobody holds anything."),
    table("wrong", ["What", "Reason", "For"], wrongOf(model), filter, "Nothing is withheld or unhealthy."),
    table("events", ["Ago", "", "Kind", "What", "Event"], eventsOf(document), filter, "Nothing has happened yet."),
  ].reduce((sum, count) => sum + count, 0);
}

function showResources(resources) {
  if (same("resources", resources)) return;
  byId("resources").replaceChildren(...resources.map((resource) => {
    const bad = resource.units - resource.healthy;
    return element("li", {},
      element("h3", { text: resource.name }), element("span", { class: "soft", text: resource.kind }),
      element("meter", { min: 0, max: Math.max(resource.units, 1), value: resource.granted, "aria-label": `granted units of ${resource.name}` }),
      element("span", { text: `${resource.granted} of ${resource.units} granted` }),
      element("span", { class: bad ? "bad" : "soft", text: bad ? `▲ ${bad} unhealthy` : "all healthy" }));
  }));
  if (!resources.length) byId("resources").append(element("li", { class: "none", text: "No resource is offered." }));
}

function railsOf(model) {
  const nics = (rail) => rail.nics.map((address) => model.label(address)).join(", ");
  return (model.document.hardware.rails ?? []).map((rail) => {
    const vfs = rail.nics.flatMap((address) => model.nics.get(address)?.vfs ?? []);
    const counts = tally(vfs.map((vf) => model.state(vf.address))).map(([state, count]) => `${count} ${state}`);
    return [model.label(rail.gpu), rail.locality ?? "–", nics(rail) || "–", counts.join(", ")];
  });
}

function slotsOf(document) {
  return (document.slots ?? []).map((slot) =>
    [slot.resource, slot.numaNode ?? "–", slot.units, slot.healthy, slot.granted, slot.bound]);
}

/** Attachments, then grants of devices that are in no pod's network. */
function heldOf(model) {
  const { attachments = [], grants = [] } = model.document;
  const attached = new Set(attachments.map((row) => row.device));
  return [
    ...attachments.map((row) => [row.device, row.resource, row.pod, row.ifname, row.addresses.join(", "), row.state, { at: row.since }]),
    ...grants.filter((grant) => !attached.has(grant.device)).map((grant) =>
      [grant.device ? model.label(grant.device) : grant.unit, grant.resource, grant.pod ?? "(not known yet)", "", "", "granted", { at: grant.since }]),
  ];
}

function wrongOf(model) {
  const { document } = model;
  const meaning = (word) => (document.reasons?.[word] ? `${word}: ${document.reasons[word]}` : word);
  const withheld = new Set((document.quarantine ?? []).map((held) => held.device));
  const unhealthy = new Map(); // resource and reason → devices
  for (const offer of document.offers ?? [])
    for (const word of withheld.has(offer.device) ? [] : offer.reasons) {
      const key = `${offer.resource}\n${word}`;
      unhealthy.set(key, [...(unhealthy.get(key) ?? []), offer.device]);
    }
  return [
    ...(document.quarantine ?? []).map((held) => [model.label(held.device) + ` (${held.device})`, `quarantine: ${held.reason}`, { at: held.since }]),
    ...[...unhealthy].map(([key, devices]) => {
      const [resource, word] = key.split("\n");
      return [`${devices.length > 4 ? `${devices.length} devices of` : devices.map((name) => model.label(name)).join(", ") + " of"} ${resource}`, meaning(word), ""];
    }),
    ...(document.slots ?? []).filter((slot) => slot.reasons.length).map((slot) => [`slots of ${slot.resource}`, slot.reasons.map(meaning).join("; "), ""]),
    ...(document.owedLeases ?? []).map((lease) => [`lease of ${lease.ifname} in ${lease.container.slice(0, 12)} (${lease.plugin || "IPAM"})`, lease.problem || "not tried yet", { at: lease.since }]),
    ...(document.problems ?? []).map((problem) => [problem.path, `cannot be read: ${problem.text}`, ""]),
  ];
}

function eventsOf(document) {
  return (document.events ?? []).map((event) =>
    [{ at: event.at }, event.warning ? "▲" : "", event.kind, event.subject, event.count > 1 ? `${event.text} (${event.count} times)` : event.text]);
}

/** Draw a table of rows, at most MOST_ROWS; a cell is text, a number, or a time as { at }. Returns how many rows fit. */
function table(id, head, rows, filter, none) {
  const words = (row) => row.map((cell) => (typeof cell === "object" ? "" : cell)).join("\n");
  const fitting = filter === null ? rows : rows.filter((row) => filter(words(row)));
  if (!same(id, fitting)) {
    const body = fitting.slice(0, MOST_ROWS).map((row) =>
      element("tr", {}, ...row.map((cell) => element("td", {}, typeof cell === "object" ? since(cell.at) : String(cell)))));
    const rest = fitting.length - MOST_ROWS;
    byId(id).replaceChildren(
      fitting.length
        ? element("table", {}, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col", text })))), element("tbody", {}, ...body))
        : element("p", { class: "none", text: rows.length ? "Nothing here fits the filter." : none }),
      ...(rest > 0 ? [element("p", { class: "none", text: `and ${rest} more: filter for them` })] : []));
  } else tick(byId(id));
  return filter === null ? 0 : fitting.length;
}

function same(id, made) {
  const text = JSON.stringify(made);
  if (shown.get(id) === text) return true;
  shown.set(id, text);
  return false;
}
