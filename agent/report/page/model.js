// Joins the parts of the status document by device. Makes no elements.

import { stateOf } from "./states.js";

const NOTHING = Object.freeze({ offers: [], held: [], quarantine: null });

/** What the page needs of one document, with everything that belongs to a device found by its name. */
export class Model {
  constructor(document) {
    this.document = document;
    this.known = new Map();
    for (const offer of document.offers ?? []) this.#of(offer.device).offers.push(offer);
    for (const held of document.held ?? []) this.#of(parentOf(held.device)).held.push(held);
    for (const held of document.quarantine ?? []) this.#of(held.device).quarantine = held;
    this.leftOut = new Map((document.notOffered ?? []).flatMap((left) => left.devices.map((name) => [name, left])));
    const hardware = document.hardware ?? {};
    this.gpus = new Map((hardware.gpus ?? []).map((gpu) => [gpu.address, gpu]));
    this.nics = new Map((hardware.nics ?? []).map((nic) => [nic.address, nic]));
    this.vfs = new Map();
    for (const nic of this.nics.values()) for (const vf of nic.vfs) this.vfs.set(vf.address, { ...vf, nic });
    this.labels = new Map();
    for (const gpu of this.gpus.values()) {
      this.labels.set(gpu.address, `GPU${gpu.index}`).set(gpu.uuid, `GPU${gpu.index}`);
      for (const mig of gpu.migDevices) this.labels.set(mig.uuid, `GPU${gpu.index} ${mig.profile}`);
    }
    [...this.nics.keys()].forEach((address, number) => this.labels.set(address, `NIC${number}`));
    for (const [address, { dataDirect }] of this.nics)
      if (dataDirect) {
        const others = this.labels.get(dataDirect)?.replace(" Data Direct", ", ") ?? "";
        this.labels.set(dataDirect, `${others}${this.labels.get(address)} Data Direct`);
      }
  }

  #of(name) {
    if (!this.known.has(name)) this.known.set(name, { offers: [], held: [], quarantine: null });
    return this.known.get(name);
  }

  /** Everything that is known of a device: offers, who holds it, quarantine. */
  of(name) {
    return this.known.get(name) ?? NOTHING;
  }

  /** The same of a GPU, whose units go by its UUID, or by those of its slices. */
  ofGpu(gpu) {
    const names = [gpu.uuid, gpu.address, ...gpu.migDevices.map((mig) => mig.uuid)].map((name) => this.of(name));
    return {
      offers: names.flatMap((found) => found.offers),
      held: names.flatMap((found) => found.held),
      quarantine: names.find((found) => found.quarantine)?.quarantine ?? null,
    };
  }

  /** What is known of whatever stands at an address. */
  at(address) {
    const gpu = this.gpus.get(address);
    return gpu ? this.ofGpu(gpu) : this.of(address);
  }

  state(address) {
    return stateOf(this.at(address));
  }

  label(name) {
    const vf = this.vfs.get(name);
    return this.labels.get(name) ?? (vf ? `${this.labels.get(vf.nic.address)} VF ${vf.index ?? "?"}` : name);
  }

  /** The pods that hold something of a device, each once. */
  pods(known) {
    return [...new Set(known.held.flatMap((held) => held.pods))];
  }

  /** All words by which a device may be looked for. */
  words(address) {
    const gpu = this.gpus.get(address), nic = this.nics.get(address), vf = this.vfs.get(address);
    const known = this.at(address);
    const own = gpu
      ? [gpu.uuid, gpu.name, ...gpu.migDevices.map((mig) => mig.uuid)]
      : nic
        ? [...nic.netdevs.map((netdev) => netdev.name), ...nic.rdma.map((rdma) => rdma.name), nic.driver]
        : [vf?.netdev, vf?.rdma, vf?.driver];
    const held = [...known.held.flatMap((row) => [row.how, row.ifname, ...row.addresses]),
      ...known.offers.flatMap((offer) => [offer.resource, ...offer.reasons])];
    return [address, this.label(address), ...own, ...held].filter(Boolean).join("\n").toLowerCase();
  }
}

/** An interface made upon an adapter goes by `<adapter>/<container>/<ifname>`. */
function parentOf(device) {
  return device.split("/", 1)[0];
}

/** Tell whether a text has all words of a filter. */
export function matches(text, filter) {
  const lower = text.toLowerCase();
  return filter.every((word) => lower.includes(word));
}

/** Take a filter apart into words. */
export function wordsOf(text) {
  return text.toLowerCase().split(/\s+/).filter(Boolean);
}
