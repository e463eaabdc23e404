// Joins the parts of the status document by device. Makes no elements.

import { stateOf } from "./states.js";

const NOTHING = Object.freeze({ offers: [], grants: [], attachments: [], quarantine: null });

/** What the page needs of one document, with everything that belongs to a device found by its name. */
export class Model {
  constructor(document) {
    this.document = document;
    this.known = new Map();
    for (const offer of document.offers ?? []) this.#of(offer.device).offers.push(offer);
    for (const grant of document.grants ?? [])
      for (const name of [grant.device, grant.gpu].filter(Boolean)) this.#of(name).grants.push(grant);
    for (const claim of document.claims ?? [])
      for (const { device, resource } of claim.devices)
        for (const pod of claim.pods.length ? claim.pods : [null])
          this.#of(device).grants.push({ resource, device, pod, container: null, since: claim.since });
    for (const row of document.attachments ?? []) this.#of(parentOf(row.device)).attachments.push(row);
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
    if (!this.known.has(name)) this.known.set(name, { offers: [], grants: [], attachments: [], quarantine: null });
    return this.known.get(name);
  }

  /** Everything that is known of a device: offers, grants, attachments, quarantine. */
  of(name) {
    return this.known.get(name) ?? NOTHING;
  }

  /** The same of a GPU, whose units go by its UUID, or by those of its slices. */
  ofGpu(gpu) {
    const names = [gpu.uuid, gpu.address, ...gpu.migDevices.map((mig) => mig.uuid)].map((name) => this.of(name));
    return {
      offers: names.flatMap((found) => found.offers),
      grants: names.flatMap((found) => found.grants),
      attachments: names.flatMap((found) => found.attachments),
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
    return [...new Set([...known.attachments, ...known.grants].map((row) => row.pod).filter(Boolean))];
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
    const held = [...known.attachments.flatMap((row) => [row.ifname, ...row.addresses, row.container]),
      ...known.offers.flatMap((offer) => [offer.resource, ...offer.reasons]), ...this.pods(known)];
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
