// Draws the PCIe tree. Built anew only when the hardware is another; else the same elements get other states, so that
// nothing moves under the pointer and the focus stays where it is.

import { byId, element, mark, say } from "./dom.js";
import { STATES, stateOf, tally } from "./states.js";

const MOST_PODS = 2;

export class Hardware {
  #root = byId("hardware");
  #shape = "";
  #items = new Map(); // key → { item, row, note, address, cells }

  /** Show a model; `filter` tells whether a device is looked for, or is null. */
  show(model, filter) {
    const { hardware } = model.document;
    const shape = JSON.stringify([hardware.tree, [...model.gpus].map(([a, gpu]) => [a, gpu.migDevices]), [...model.vfs.keys()]]);
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
    if (!nodes.length) this.#root.append(element("li", { role: "none", class: "none", text: "No GPU and no NIC is known." }));
    const first = this.#root.querySelector("[role=treeitem]");
    const again = focused && this.#items.get(focused)?.item;
    (again ?? first)?.setAttribute("tabindex", "0");
    again?.focus({ preventScroll: true });
  }

  #branch(model, key, kind, name, note, below) {
    const parts = below.map((part, number) =>
      "device" in part
        ? this.#device(model, part.device)
        : this.#branch(model, `${key}/${number}`, "bridge", part.bridges.at(-1), part.bridges.slice(0, -1).join(" / "), part.below));
    const row = element("div", { class: "row" }, element("strong", { text: name }), element("span", { class: "soft", text: note }));
    return element("li", { role: "treeitem", class: kind, tabindex: -1, "aria-expanded": "true", "aria-label": `${name}, ${note}`, data: { key } },
      row, element("ul", { role: "group" }, ...parts));
  }

  #device(model, address) {
    const gpu = model.gpus.get(address), nic = model.nics.get(address);
    const small = gpu ? gpu.migDevices.map((mig) => mig.uuid) : (nic?.vfs ?? []).map((vf) => vf.address);
    const cells = small.map((key) => {
      const item = element("li", { role: "treeitem", class: "cell", tabindex: -1, data: { key } });
      this.#items.set(key, { item, address: key });
      return item;
    });
    const name = element("strong", { text: model.label(address) });
    const row = element("div", { class: "row" }, element("span", { class: "glyph", "aria-hidden": "true" }), name,
      element("span", { class: "names", text: gpu?.name ?? (nic ? namesOf(nic) : address) }));
    const note = element("div", { class: "note soft" });
    const item = element("li", { role: "treeitem", class: gpu ? "gpu" : "nic", tabindex: -1, data: { key: address } }, row, note);
    if (cells.length) {
      item.setAttribute("aria-expanded", "true");
      item.append(element("ul", { role: "group", class: "cells" }, ...cells));
    }
    this.#items.set(address, { item, note, address, cells: small });
    return item;
  }

  #paint(model, filter) {
    let found = 0;
    for (const { item, note, address, cells } of this.#items.values()) {
      const known = model.at(address), state = stateOf(known);
      mark(item, "data-state", state);
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
      mark(item, "data-dim", hit || (cells ?? []).some((cell) => filter(model.words(cell))) ? null : "");
    }
    return found;
  }
}

function namesOf(nic) {
  return [...nic.rdma.map((rdma) => rdma.name), ...nic.netdevs.map((netdev) => netdev.name)].join(" · ") || nic.driver || nic.address;
}

/** One line about a GPU or NIC: how its VFs stand, what of it is handed out, to whom, and its link. */
function noteOf(model, address, known, cells) {
  const parts = [tally(cells.map((cell) => model.state(cell))).map(([state, count]) => `${count} ${state}`).join(", ")];
  for (const offer of known.offers) {
    const bad = offer.reasons.length ? `: ${offer.reasons.join(", ")}` : "";
    if (offer.units > 1 || bad) parts.push(`${offer.granted}/${offer.units} ${offer.resource}${bad}`);
  }
  const pods = model.pods(known);
  if (pods.length) parts.push(pods.slice(0, MOST_PODS).join(", ") + (pods.length > MOST_PODS ? ` and ${pods.length - MOST_PODS} more` : ""));
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
