// Asks the agent for its status every two seconds and shows it. While nothing changes the answer is a few bytes.

import { Details } from "./details.js";
import { byId, element, mark, say } from "./dom.js";
import { Hardware } from "./hardware.js";
import { walk } from "./keyboard.js";
import { showLegend, showTables } from "./tables.js";
import { Model, matches, wordsOf } from "./model.js";
import { setClock, tick } from "./times.js";

const EVERY_MS = 2000, PATIENCE_MS = 6000;

const hardware = new Hardware(), details = new Details();
let model = null, tag = null, staleSince = null, timer = null;

function show() {
  if (model === null) return;
  const words = wordsOf(byId("filter").value);
  const filter = words.length ? (text) => matches(text, words) : null;
  const devices = hardware.show(model, filter), rows = showTables(model, filter);
  say(byId("matches"), filter ? `${count(devices, "device")}, ${count(rows, "row")}` : "");
  details.show(model);
}

function count(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

function showHead(document) {
  globalThis.document.title = `${document.node} – nodefabric`;
  say(byId("node"), document.node);
  say(byId("version"), `nodefabric ${document.version}`);
  say(byId("readiness"), document.ready ? "● ready" : "▲ not ready");
  mark(byId("readiness"), "data-ready", String(document.ready));
  const wrong = Object.entries(document.obstacles ?? {});
  byId("obstacles").replaceChildren(...(wrong.length
    ? wrong.map(([name, what]) => element("p", {}, element("strong", { text: `▲ ${name}: ` }), what))
    : [element("p", { class: "soft", text: "Nothing keeps the agent from its work." })]));
  mark(byId("obstacles"), "data-wrong", wrong.length ? "" : null);
}

function fresh() {
  staleSince = null;
  say(byId("freshness"), "● live");
  mark(document.body, "data-stale", null);
}

function stale(why) {
  staleSince ??= new Date();
  say(byId("freshness"), `▲ stale since ${staleSince.toLocaleTimeString()}: ${why}`);
  mark(document.body, "data-stale", "");
}

async function ask() {
  const answer = await fetch("/status", {
    cache: "no-store",
    headers: tag ? { "If-None-Match": tag } : {},
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  setClock(answer.headers.get("Date"));
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300).trim() || `status ${answer.status}`);
  const document = await answer.json();
  if (document.format === undefined)  // an agent that has just begun, with a configuration that it cannot use
    throw new Error(`the agent waits for its configuration to be repaired: ${document.obstacles?.config ?? ""}`);
  tag = answer.headers.get("ETag");
  model = new Model(document);
  showHead(document);
  show();
}

async function follow() {
  clearTimeout(timer);
  try {
    await ask();
    fresh();
  } catch (error) {
    stale(error instanceof TypeError || error.name === "TimeoutError" ? "the agent does not answer" : error.message);
  }
  tick();
  if (!document.hidden) timer = setTimeout(follow, EVERY_MS);
}

showLegend();
walk(byId("hardware"));
details.follow(byId("hardware"));
byId("filter").addEventListener("input", show);
document.addEventListener("visibilitychange", () => document.hidden || follow());
follow();
