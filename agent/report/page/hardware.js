// Draws the PCIe tree. Built anew only when the hardware is another; else the same elements get other states, so that
// nothing moves under the pointer and the focus stays where it is.

import { byId, element, mark, say } from "./dom.js";
import { STATES, counted, stateOf } from "./states.js";

const MOST_PODS = 2;

export class Hardware {
  #root = byId("hardware");
  #shape = "";
  #items = new Map(); // key → { item, glyph, note, cells }

  /** Show a model; `filter` tells whether a device is looked for, or is null. */
  show(model, filter) {
    const { hardware } = model.document;
    const slices = [...model.gpus].map(([address, gpu]) => [address, gpu.migDevices]);
    const shape = JSON.stringify([hardware.tree, slices, [...model.vfs.keys()]]);
    if (shape !== this.#shape) {
      this.#build(model, hardware.tree);
      this.#shape = shape;
    }
    return this.#paint(model, filter);
  }

  #build(model, groups) {
    const focused = this.#root.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.#items.clear();
    const nodes = groups.map((group, number) => {
      const name = group.numaNode === null ? "Unknown NUMA node" : `NUMA node ${group.numaNode}`;
      const cpus = group.cpus ? `CPUs ${group.cpus}` : "";
      return this.#branch(model, `numa-${number}`, "numa", name, cpus, group.below);
    });
    this.#root.replaceChildren(...nodes);
    if (!nodes.length)
      this.#root.append(element("li", { role: "none", class: "none", text: "No GPU and no NIC is known." }));
    const first = this.#root.querySelector("[role=treeitem]");
    const again = focused && this.#items.get(focused)?.item;
    (again ?? first)?.setAttribute("tabindex", "0");
    again?.focus({ preventScroll: true });
  }

  #branch(model, key, kind, name, note, below) {
    const parts = below.map((part, number) => {
      if ("device" in part) return this.#device(model, part.device);
      const [name, way] = [part.bridges.at(-1), part.bridges.slice(0, -1).join(" / ")];
      return this.#branch(model, `${key}/${number}`, "bridge", name, way, part.below);
    });
    const item = element("li", { role: "treeitem", class: kind, tabindex: -1, data: { key } },
      element("div", { class: "row" }, element("strong", { text: name }), element("span", { class: "soft", text: note })),
      element("ul", { role: "group" }, ...parts));
    mark(item, "aria-expanded", "true");
    mark(item, "aria-label", `${name}, ${note}`);
    return item;
  }

  #device(model, address) {
    const gpu = model.gpus.get(address), nic = model.nics.get(address);
    const small = gpu ? gpu.migDevices.map((mig) => mig.uuid) : (nic?.vfs ?? []).map((vf) => vf.address);
    const cells = small.map((key) => {
      const item = element("li", { role: "treeitem", class: "cell", tabindex: -1, data: { key } });
      this.#items.set(key, { item });
      return item;
    });
    const glyph = element("span", { class: "glyph", "aria-hidden": "true" });
    const note = element("div", { class: "note soft" });
    const names = gpu?.name ?? (nic ? namesOf(nic) : address);
    const item = element("li", { role: "treeitem", class: gpu ? "gpu" : "nic", tabindex: -1, data: { key: address } },
      element("div", { class: "row" }, glyph, element("strong", { text: model.label(address) }),
        element("span", { class: "names", text: names })),
      note);
    if (cells.length) {
      item.setAttribute("aria-expanded", "true");
      item.append(element("ul", { role: "group", class: "cells" }, ...cells));
    }
    this.#items.set(address, { item, glyph, note, cells: small });
    return item;
  }

  #paint(model, filter) {
    let found = 0;
    for (const [address, { item, glyph, note, cells = [] }] of this.#items) {
      const known = model.at(address), state = stateOf(known);
      mark(item, "data-state", state);
      if (glyph) mark(glyph, "data-state", state);
      const words = [model.label(address), STATES[state], ...model.pods(known).slice(0, MOST_PODS)];
      if (note) {
        const text = noteOf(model, address, known, cells);
        say(note, text);
        mark(note, "title", text);
        words.push(text);
      }
      mark(item, "aria-label", words.join(", "));
      const hit = filter === null || filter(model.words(address));
      found += filter !== null && hit;
      mark(item, "data-dim", hit || cells.some((cell) => filter(model.words(cell))) ? null : "");
    }
    return found;
  }
}

function namesOf(nic) {
  const names = [...nic.rdma, ...nic.netdevs].map((named) => named.name);
  return names.join(" · ") || nic.driver || nic.address;
}

/** One line about a GPU or NIC: how its VFs stand, what of it is handed out, to whom, and its link. */
function noteOf(model, address, known, cells) {
  const parts = [counted(cells.map((cell) => model.state(cell)))];
  for (const offer of known.offers) {
    const bad = offer.reasons.length ? `: ${offer.reasons.join(", ")}` : "";
    if (offer.units > 1 || bad) parts.push(`${offer.granted}/${offer.units} ${offer.resource}${bad}`);
  }
  const pods = model.pods(known);
  const rest = pods.length - MOST_PODS;
  if (pods.length) parts.push(pods.slice(0, MOST_PODS).join(", ") + (rest > 0 ? ` and ${rest} more` : ""));
  const nic = model.nics.get(address);
  if (nic) parts.push(linkOf(nic));
  return parts.filter(Boolean).join(" · ") || STATES[stateOf(known)];
}

function linkOf(nic) {
  const port = nic.rdma.flatMap((rdma) => rdma.ports)[0], netdev = nic.netdevs[0];
  if (port) return `${port.state.toLowerCase()} ${port.rateGbps} Gb/s`;
  if (netdev) return netdev.speedMbps ? `${netdev.state} ${netdev.speedMbps / 1000} Gb/s` : netdev.state;
  return "";
}
