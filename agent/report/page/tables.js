// The tables: resources, rails, slots, who holds what, what is wrong, recent events.

import { since } from "./details.js";
import { byId, element, mark, say } from "./dom.js";
import { STATES, counted } from "./states.js";
import { tick } from "./times.js";

const MOST_ROWS = 200, MOST_NAMES = 4;
const shown = new Map(); // id → what it was made from: equal rows are left alone

/** Explain the shapes. */
export function showLegend() {
  const lines = Object.entries(STATES).map(([state, text]) =>
    element("li", {}, element("span", { class: "glyph", "aria-hidden": "true", data: { state } }), text));
  byId("legend").replaceChildren(...lines);
}

/** Show all tables; `filter` tells whether a row is looked for, or is null. Returns how many rows are. */
export function showTables(model, filter) {
  const { document } = model;
  showResources(document.resources ?? []);
  mark(byId("slots-section"), "hidden", document.slots?.length ? null : "");
  say(byId("dra"), document.dra ? driverOf(document.dra) : "");
  const tables = [
    ["rails", ["GPU", "Near", "NIC", "VFs"], railsOf(model), "No GPU is known."],
    ["left-out", ["Devices", "Left out by", "Why", "What to do"], leftOutOf(document), "Everything here is offered."],
    ["slots", ["Resource", "NUMA", "Slots", "Healthy", "Granted", "Bound"], slotsOf(document), "None."],
    ["held", ["Device", "Resource", "Held", "Interface", "Address", "State", "For"], heldOf(model), "Nobody holds anything."],
    ["wrong", ["What", "Reason", "For"], wrongOf(model), "Nothing is unavailable."],
    ["events", ["Ago", "", "Kind", "What", "Event"], eventsOf(document), "Nothing has happened yet."],
  ];
  return tables.reduce((sum, [id, head, rows, none]) => sum + showTable(id, head, rows, filter, none), 0);
}

function showResources(resources) {
  if (same("resources", resources)) return;
  const cards = resources.map((resource) => {
    const bad = resource.units - resource.healthy;
    const label = `granted units of ${resource.name}`;
    return element("li", {},
      element("h3", { text: resource.name }),
      element("span", { class: "soft", text: resource.kind }),
      element("meter", { min: 0, max: Math.max(resource.units, 1), value: resource.granted, "aria-label": label }),
      element("span", { text: `${resource.granted} of ${resource.units} granted` }),
      element("span", { class: bad ? "bad" : "soft", text: bad ? `▲ ${bad} unhealthy` : "all healthy" }));
  });
  if (!cards.length) cards.push(element("li", { class: "none", text: "No resource is offered." }));
  byId("resources").replaceChildren(...cards);
}

function railsOf(model) {
  return (model.document.hardware.rails ?? []).map((rail) => {
    const nics = rail.nics.map((address) => model.label(address)).join(", ");
    const vfs = rail.nics.flatMap((address) => model.nics.get(address)?.vfs ?? []);
    const states = counted(vfs.map((vf) => model.state(vf.address)));
    return [model.label(rail.gpu), rail.locality ?? "–", nics || "–", states];
  });
}

function leftOutOf(document) {
  const others = (document.notOffered ?? []).filter((left) => left.reason !== "Unhealthy"); // they have a table
  return others.map((left) => [left.what, left.resource || "–", left.text, left.remedy]);
}

function slotsOf(document) {
  return (document.slots ?? []).map((slot) =>
    [slot.resource, slot.numaNode ?? "–", slot.units, slot.healthy, slot.granted, slot.bound]);
}

/** Say how the DRA driver stands. */
function driverOf(dra) {
  const known = dra.registered ? "registered with kubelet" : `▲ not registered with kubelet: ${dra.problem}`;
  const slices = `${dra.slices ?? "an unknown number of"} slice${dra.slices === 1 ? "" : "s"} published`;
  const sick = dra.devices.filter((found) => found.health !== "healthy").map((found) => `${found.count} ${found.health}`);
  const devices = dra.devices.reduce((sum, found) => sum + found.count, 0);
  const told = [known, slices, `${devices} device${devices === 1 ? "" : "s"}${sick.length ? ` (▲ ${sick.join(", ")})` : ""}`];
  if (dra.dropped.length) told.push(`▲ the cluster leaves out ${dra.dropped.join(", ")}`);
  return `DRA driver ${dra.driver}: ${told.join("; ")}`;
}

function heldOf(model) {
  return (model.document.held ?? []).map((row) => {
    const label = model.label(row.device);
    const name = row.ifname || label === row.device ? row.device : label;
    return [name, row.resource, row.how, row.ifname, row.addresses.join(", "), row.state, { at: row.since }];
  });
}

function wrongOf(model) {
  const { quarantine = [], offers = [], slots = [], owedLeases = [], problems = [], reasons = {} } = model.document;
  const explained = (word) => (reasons[word] ? `${word}: ${reasons[word]}` : word);
  const withheld = new Set(quarantine.map((held) => held.device));
  const unhealthy = new Map(); // resource and reason → devices
  for (const offer of offers)
    for (const word of withheld.has(offer.device) ? [] : offer.reasons) {
      const key = JSON.stringify([offer.resource, word]);
      unhealthy.set(key, [...(unhealthy.get(key) ?? []), offer.device]);
    }
  const units = [...unhealthy].map(([key, devices]) => {
    const [resource, word] = JSON.parse(key);
    const many = devices.length > MOST_NAMES;
    const names = many ? `${devices.length} devices` : devices.map((name) => model.label(name)).join(", ");
    return [`${names} of ${resource}`, explained(word), ""];
  });
  const leases = owedLeases.map((lease) => {
    const name = `lease of ${lease.ifname} in ${lease.container.slice(0, 12)} (${lease.plugin || "IPAM"})`;
    return [name, lease.problem || "not tried yet", { at: lease.since }];
  });
  return [
    ...quarantine.map((held) =>
      [`${model.label(held.device)} (${held.device})`, `quarantine: ${held.reason}`, { at: held.since }]),
    ...units,
    ...slots.filter((slot) => slot.reasons.length).map((slot) =>
      [`slots of ${slot.resource}`, slot.reasons.map(explained).join("; "), ""]),
    ...leases,
    ...problems.map((problem) => [problem.path, `cannot be read: ${problem.text}`, ""]),
  ];
}

function eventsOf(document) {
  return (document.events ?? []).map((event) => {
    const text = event.count > 1 ? `${event.text} (${event.count} times)` : event.text;
    return [{ at: event.at }, event.warning ? "▲" : "", event.kind, event.subject, text];
  });
}

/** Draw a table, of at most MOST_ROWS rows; a cell is text, a number, or a time as { at }. Returns how many rows fit. */
function showTable(id, head, rows, filter, none) {
  const words = (row) => row.filter((cell) => typeof cell !== "object").join("\n");
  const fitting = filter === null ? rows : rows.filter((row) => filter(words(row)));
  if (same(id, [fitting, rows.length > 0])) tick(byId(id));
  else if (fitting.length) byId(id).replaceChildren(...tableOf(head, fitting));
  else byId(id).replaceChildren(element("p", { class: "none", text: rows.length ? "Nothing here fits the filter." : none }));
  return filter === null ? 0 : fitting.length;
}

function tableOf(head, rows) {
  const cells = (row) => row.map((cell) => element("td", {}, typeof cell === "object" ? since(cell.at) : String(cell)));
  const made = element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col", text })))),
    element("tbody", {}, ...rows.slice(0, MOST_ROWS).map((row) => element("tr", {}, ...cells(row)))));
  const rest = rows.length - MOST_ROWS;
  return rest > 0 ? [made, element("p", { class: "none", text: `and ${rest} more: filter for them` })] : [made];
}

function same(id, made) {
  const text = JSON.stringify(made);
  if (shown.get(id) === text) return true;
  shown.set(id, text);
  return false;
}
