// Everything about one device, beside the tree: of the one that has the focus or the pointer, or that was kept open.

import { byId, element, say } from "./dom.js";
import { STATES, stateOf } from "./states.js";
import { ago, moment } from "./times.js";

const MOST_ROWS = 40;

export class Details {
  #key = null;
  #kept = false;
  #shown = "";
  #model = null;

  /** Follow focus, pointer, Enter and Escape in a tree. */
  follow(root) {
    const keyOf = (event) => event.target.closest?.("[data-key]")?.dataset.key ?? null;
    const look = (event) => this.#kept || this.#turn(keyOf(event), false);
    root.addEventListener("focusin", look);
    root.addEventListener("pointerover", look);
    root.addEventListener("click", (event) => this.#turn(keyOf(event), true));
    root.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        this.#turn(keyOf(event), true);
      } else if (event.key === "Escape") this.#turn(keyOf(event), false);
    });
  }

  /** Take over another model. */
  show(model) {
    this.#model = model;
    this.#draw();
  }

  #turn(key, kept) {
    if (key === null) return;
    this.#key = key;
    this.#kept = kept;
    for (const former of document.querySelectorAll("[aria-selected=true]")) former.removeAttribute("aria-selected");
    if (kept) document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.setAttribute("aria-selected", "true");
    this.#draw();
  }

  #draw() {
    if (this.#key === null || this.#model === null) return;
    const facts = factsOf(this.#model, this.#key);
    const signature = JSON.stringify([this.#key, this.#kept, facts]);
    if (signature === this.#shown) return;
    this.#shown = signature;
    const name = this.#key.startsWith("numa-") ? "Place" : this.#model.label(this.#key);
    say(byId("details-title"), this.#kept ? `${name} (kept)` : name);
    const rows = facts.slice(0, MOST_ROWS).flatMap(([name, value, at]) => [
      element("dt", { text: name }),
      element("dd", { text: at ? null : value }, ...(at ? [`${value} `, since(at)] : [])),
    ]);
    const rest = facts.length - MOST_ROWS;
    if (rest > 0) rows.push(element("dt", { text: "…" }), element("dd", { text: `and ${rest} more` }));
    byId("details-body").replaceChildren(element("dl", {}, ...rows));
  }
}

/** A time that keeps itself up to date (times.js). */
export function since(at) {
  const datetime = new Date(at * 1000).toISOString();
  return element("time", { text: ago(at), title: moment(at), datetime, data: { at } });
}

/** List what is known of a device as [name, value, since when]. */
function factsOf(model, key) {
  const gpu = model.gpus.get(key), nic = model.nics.get(key), vf = model.vfs.get(key);
  const facts = [];
  const add = (name, value, at = null) => {
    if (value !== null && value !== undefined && value !== "" && value !== false) facts.push([name, String(value), at]);
  };
  if (key.startsWith("numa-")) {
    add("Place", "a NUMA node, host bridge or switch: what is below it meets there");
    return facts;
  }
  const known = model.at(key), state = stateOf(known);
  add("State", STATES[state]);
  add("Address", gpu?.address ?? key);
  if (gpu) {
    add("GPU", gpu.name);
    add("UUID", gpu.uuid);
    add("Memory", `${Math.round(gpu.memoryBytes / 2 ** 30)} GiB`);
    add("NVLinks", gpu.nvlinks || null);
    add("MIG", gpu.migMode ? `${gpu.migDevices.length} slices` : null);
    for (const word of gpu.ailments) add("Ailment", explained(model, word));
  }
  for (const rdma of nic?.rdma ?? []) {
    add("RDMA device", `${rdma.name}, firmware ${rdma.firmware}`);
    for (const port of rdma.ports) add(`Port ${port.number}`, `${port.state} ${port.linkLayer} ${port.rateGbps} Gb/s`);
  }
  for (const netdev of nic?.netdevs ?? []) add("Interface", `${netdev.name} ${netdev.state}, MTU ${netdev.mtu}`);
  if (vf) {
    add("VF", `${vf.index ?? "?"} of ${model.label(vf.nic.address)} (${vf.nic.address})`);
    add("Interface", vf.netdev);
    add("RDMA device", vf.rdma);
  }
  add("Driver", (gpu ?? nic ?? vf)?.driver);
  add("NUMA node", (gpu ?? nic ?? vf?.nic)?.numaNode);
  add("Towards GPUs", nearnessOf(model, nic ?? vf?.nic));
  for (const offer of known.offers) {
    add("Resource", `${offer.resource}: ${offer.granted} of ${offer.units} granted`);
    for (const word of offer.reasons) add("Unhealthy", explained(model, word));
  }
  const left = model.leftOut.get(gpu?.address ?? key) ?? (gpu && model.leftOut.get(gpu.uuid));
  if (left) add("Not offered", `${left.resource ? `by ${left.resource}: ` : ""}${left.text}. ${left.remedy}`);
  if (known.quarantine) add("Quarantine", known.quarantine.reason, known.quarantine.since);
  for (const row of known.held) {
    const where = row.ifname ? ` as ${row.ifname} ${row.addresses.join(" ")}` : "";
    add("Held", `${row.resource}: ${row.how}${where} (${row.state})`, row.since);
  }
  return facts;
}

/** Say where an adapter stands towards GPUs, if that is not where its PF is. */
function nearnessOf(model, nic) {
  if (!nic) return null;
  const { nearness } = model.document.hardware;
  if (nearness?.unknownNics?.includes(nic.address)) return `not known: ${nearness.reason}`;
  return nic.dataDirect ? `where ${nic.dataDirect} is (Data Direct)` : null;
}

function explained(model, word) {
  const text = model.document.reasons?.[word];
  return text ? `${word}: ${text}` : word;
}
