// One incident: what failed, what the system did, what it cost, and whether anything is left to do.

import { get, part } from "../api.js";
import { REFRESH_ACTIVE_MS, REFRESH_IDLE_MS } from "../bounds.js";
import { byId, facts, h, icon, mark, say } from "../dom.js";
import { age, clock, duration, number, sentence, since, stamp, words } from "../format.js";
import { Live } from "../live.js";
import { showState } from "../states.js";

const PARTS = [["detect", "Detect", "failed_at", "detected_at"], ["decide", "Decide", "detected_at", "decided_at"], ["recover", "Recover", "decided_at", "recovered_at"]];
const COSTS = ["steps_lost", "replayed_steps", "groups_reassigned", "tokens_wasted"];
const id = document.querySelector("main").dataset.incident;
let open = true;
let shown = "";

async function refresh() {
  const incident = await get(`/v1/incidents/${part(id)}`);
  open = incident.open;
  const text = JSON.stringify(incident);
  showTime(incident);
  if (text === shown) return;
  shown = text;
  showHeading(incident);
  showFacts(incident);
  showDecisions(incident);
  const tail = byId("tail");
  say(tail, incident.log_tail || "No log lines belong to this incident.");
  tail.scrollTop = tail.scrollHeight;
}

function showHeading(incident) {
  const title = `${sentence(incident.kind)}${incident.subject ? ` · ${incident.subject}` : ""}`;
  document.title = `${title} · Whimbrel`;
  say(byId("name"), title);
  showState(byId("state"), incident.open ? "open" : "recovered");
  say(byId("message"), incident.message);
  const run = byId("run");
  run.hidden = !incident.run_id;
  run.href = `/runs/${incident.run_id}`;
  say(run, incident.run_name ?? incident.run_id ?? "");
  const log = byId("log");
  log.hidden = !(incident.run_id && incident.worker);
  log.href = `/runs/${incident.run_id}/workers/${incident.worker}/logs`;
}

function showTime(incident) {
  const { seconds } = incident;
  const elapsed = seconds.total ?? since(incident.failed_at ?? incident.detected_at) ?? 0;
  const done = (seconds.detect ?? 0) + (seconds.decide ?? 0);
  const lengths = { ...seconds, recover: seconds.recover ?? Math.max(0, elapsed - done) };
  const whole = (lengths.detect ?? 0) + (lengths.decide ?? 0) + lengths.recover || 1;
  for (const bar of byId("split").children) bar.style.width = `${(100 * (lengths[bar.dataset.part] ?? 0)) / whole}%`;
  mark(byId("split"), "data-open", incident.open);
  say(byId("total"), incident.open ? `open for ${age(elapsed)}` : `${duration(elapsed)} from failure to recovery`);
  const lines = PARTS.map(([key, name, from, to]) => [key, name, seconds[key] === null ? "not yet" : duration(seconds[key]),
    incident[from] && incident[to] ? `${clock(incident[from])} – ${clock(incident[to])}` : incident[from] ? `since ${clock(incident[from])}` : ""]);
  mark(byId("split"), "aria-label", lines.map(([, name, took]) => `${name}: ${took}`).join(", "));
  byId("split-facts").replaceChildren(...lines.flatMap(([key, name, took, when]) => [
    h("dt", { class: "key", "data-part": key }, name), h("dd", {}, took), h("dd", { class: "figures when" }, when)]));
}

function showFacts(incident) {
  say(byId("cause"), incident.cause || incident.message);
  facts(byId("facts"), [
    ["Worker", incident.worker || "–"], ["Node", incident.node || "–"], ["Last sign of life", stamp(incident.failed_at)],
    ["Detected", stamp(incident.detected_at)], ["Recovered", incident.open ? "not yet" : stamp(incident.recovered_at)],
  ]);
  const costs = [...COSTS, ...Object.keys(incident.cost).filter((name) => !COSTS.includes(name))];
  facts(byId("cost"), costs.map((name) => [sentence(name), plain(incident.cost[name] ?? (incident.open ? "not known yet" : 0))]));
  const details = Object.entries(incident.details);
  facts(byId("details"), details.length ? [...details.map(([name, value]) => [words(name), plain(value)]), ["id", incident.id]] : [["id", incident.id]]);
}

function showDecisions(incident) {
  const items = incident.decisions.map((one) => h("li", {}, h("time", { datetime: one.at ?? null }, clock(one.at)), icon("info"),
    h("p", {}, h("strong", {}, sentence(one.decision ?? "")), one.reason ? `: ${one.reason}` : "")));
  byId("decisions").replaceChildren(...(items.length ? items : [h("p", { class: "none" }, "Nothing has been decided yet.")]));
  const hint = incident.details.hint;
  say(byId("advice"), hint || (incident.open ? "The system is at work; you need not do anything now." : "Nothing is needed from you."));
}

const plain = (value) => (typeof value === "number" ? number(value, Number.isInteger(value) ? 0 : 2) : typeof value === "string" ? value : JSON.stringify(value));

new Live({ refresh, periodMs: () => (open ? REFRESH_ACTIVE_MS : REFRESH_IDLE_MS) }).start();
