// One run: its state in a sentence, four figures, the fleet timeline, six curves, and what happened last.

import { get, part } from "../api.js";
import { EVENTS_SHOWN, INCIDENTS_SHOWN, REFRESH_ACTIVE_MS, REFRESH_IDLE_MS, TIMELINE_ALL_MS } from "../bounds.js";
import { Curves } from "../curves.js";
import { byId, h, keyed, mark, row, say } from "../dom.js";
import { age, duration, figure, millis, number, percent, UNKNOWN } from "../format.js";
import { Live } from "../live.js";
import { act, confirmed, eventItem, incidentRow, updateIncidentRow } from "../rows.js";
import { showState } from "../states.js";
import { Timeline } from "../timeline.js";
import { showAudit } from "../audit.js";

const { run: id } = document.querySelector("main").dataset;
const path = `/v1/runs/${part(id)}`;
const ENDED = new Set(["completed", "failed", "stopped"]);
const timeline = new Timeline();
let run = null;
let events = null;
let failures = [];
let timelineRead = 0;
const curves = new Curves(byId("plots"), id, () => failures);
const tiles = Object.fromEntries([["reward", "Reward"], ["tokens", "Tokens per second"], ["staleness", "Staleness"], ["ettr", "Effective training time"]].map(([key, title]) => {
  const value = h("div", { class: "value" }, UNKNOWN);
  const note = h("p", {}, "\u00a0");
  byId("tiles").append(h("section", { class: "card tile", "aria-label": title }, h("h2", {}, title), value, note));
  return [key, { value, note }];
}));

async function refresh() {
  const [found, workers, incidents, audit] = await Promise.all([get(path), get(`${path}/workers`), get(`${path}/incidents?limit=${INCIDENTS_SHOWN}`), get(`${path}/audit`)]);
  run = found;
  if (events === null) events = (await get(`${path}/events?limit=${EVENTS_SHOWN}`)).items;
  await Promise.all([curves.read(run.status.head_version), readTimeline()]);
  showHeading();
  showTiles();
  keyed(byId("workers").tBodies[0], workers.items, (one) => one.worker, workerRow, updateWorker);
  byId("incidents").hidden = incidents.items.length === 0;
  byId("no-incidents").hidden = incidents.items.length > 0;
  keyed(byId("incidents").tBodies[0], incidents.items, (one) => one.id, (one) => incidentRow(byId("incidents"), one, false), updateIncidentRow);
  showEvents();
  showAudit(audit);
}

async function readTimeline() {
  const all = timeline.windowS === 0;
  if (all && Date.now() - timelineRead < TIMELINE_ALL_MS) return;
  timelineRead = Date.now();
  const ended = run.finished_at !== null;
  const edge = ended ? millis(run.finished_at) + 1000 : Date.now();
  const from = all ? "" : `?since=${encodeURIComponent(new Date(edge - timeline.windowS * 1000).toISOString())}`;
  const data = await get(`${path}/timeline${from}`);
  timeline.show(data, ended ? edge : millis(data.until), !ended);
  const before = failures.join();
  failures = data.incidents.map((one) => versionAt(data.versions, millis(one.failed_at ?? one.detected_at))).filter((version) => version !== null);
  if (before !== failures.join()) curves.draw();
}

/** The newest version that was committed at this moment. */
function versionAt(versions, at) {
  return versions.findLast((one) => millis(one.committed_at) <= at)?.version ?? null;
}

function showHeading() {
  const { status } = run;
  document.title = `${run.name} · ${status.state} · Whimbrel`;
  say(byId("name"), run.name);
  showState(byId("state"), status.state);
  say(byId("reason"), status.reason || (status.state === "running" ? `${status.workers_running} of ${status.workers_total} workers run; version ${status.head_version} is committed.` : `The run is ${status.state}.`));
  const done = Math.max(0, status.head_version);
  byId("bar").firstElementChild.style.width = `${(100 * done) / status.max_steps}%`;
  mark(byId("bar"), "aria-valuemax", status.max_steps);
  mark(byId("bar"), "aria-valuenow", done);
  const left = status.eta_seconds === null ? "" : ` · ${duration(status.eta_seconds)} left`;
  const ran = run.finished_at ? ` · took ${duration((millis(run.finished_at) - millis(run.started_at ?? run.created_at)) / 1000)}` : left;
  say(byId("progress"), `step ${done} of ${status.max_steps} · version ${status.head_version < 0 ? UNKNOWN : status.head_version}${ran}`);
  const verbs = ENDED.has(status.state) ? [] : [run.desired === "paused" ? "resume" : "pause", "stop"];
  keyed(byId("actions"), ["versions", ...verbs], (verb) => verb, action);
}

const ACTIONS = { pause: "Pause", resume: "Resume", stop: "Stop" };

function action(verb) {
  if (verb === "versions") return h("a", { class: "button", href: `/runs/${part(id)}/versions` }, "Versions");
  return h("button", { type: "button", onclick: async () => {
    const text = "Its workers end; what is committed stays. A stopped run is not started again.";
    if (verb === "stop" && !(await confirmed(`Stop ${run.name}?`, text, "Stop the run"))) return;
    if (await act(`${path}/${verb}`, `Asked to ${verb} ${run.name}.`)) live.soon();
  } }, ACTIONS[verb]);
}

function showTiles() {
  const { status, spec } = run;
  const rewards = curves.values("reward/mean");
  const before = rewards.length > 10 ? rewards.at(-1) - rewards.at(-11) : null;
  tile("reward", figure(status.reward), "", before === null ? "mean of the newest step" : `${before >= 0 ? "+" : "−"}${number(Math.abs(before), 2)} in 10 versions`);
  tile("tokens", number(status.tokens_per_s), "tok/s", `${status.workers_running} of ${status.workers_total} workers run`);
  tile("staleness", number(status.staleness_mean, 1), `max ${number(status.staleness_max)}`, `at most ${spec.staleness?.max_versions ?? UNKNOWN} versions allowed`);
  const open = status.open_incidents ? ` · ${status.open_incidents} open` : "";
  tile("ettr", percent(status.ettr), "", `${status.recoveries} ${status.recoveries === 1 ? "recovery" : "recoveries"}${open}`);
}

function tile(key, value, unit, note) {
  const text = `${value}|${unit}`;
  if (tiles[key].value.dataset.text !== text) tiles[key].value.replaceChildren(value, h("small", {}, unit));
  tiles[key].value.dataset.text = text;
  say(tiles[key].note, note);
}

function workerRow(worker) {
  const line = row(byId("workers"), [3]);
  line.cells[0].append(h("span", { class: "pill" }));
  line.cells[1].append(h("span", { class: "name" }, worker.worker));
  line.cells[6].append(h("a", { href: `/runs/${part(id)}/workers/${part(worker.worker)}/logs`, "aria-label": `Log of ${worker.worker}` }, "Log"));
  return line;
}

function updateWorker(line, worker) {
  const cells = line.cells;
  showState(cells[0].firstElementChild, worker.state);
  say(cells[2], worker.node || UNKNOWN);
  const rate = worker.gauges.tokens_per_s ? ` · ${number(worker.gauges.tokens_per_s)} tok/s` : "";
  say(cells[3], worker.state === "running" || worker.state === "starting" ? `${worker.phase || worker.state}${worker.phase_age_s > 5 ? ` for ${age(worker.phase_age_s)}` : ""}${rate}` : worker.reason || UNKNOWN);
  mark(cells[3], "title", worker.note);
  say(cells[4], worker.policy_version < 0 ? UNKNOWN : number(worker.policy_version));
  say(cells[5], number(worker.start));
}

function showEvents() {
  keyed(byId("events"), [...events].reverse().slice(0, EVENTS_SHOWN), (event) => event.id, eventItem);
}

for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[data-window]")) mark(other, "aria-pressed", other === button);
    timeline.zoom(Number(button.dataset.window));
    timelineRead = 0;
    live.soon();
  });
}

function onEvent(event) {
  if (events === null || events.some((one) => one.id === event.id)) return;
  events = [...events, event].slice(-EVENTS_SHOWN);
  showEvents();
}

const live = new Live({ run: id, refresh, onEvent, periodMs: () => (run !== null && ENDED.has(run.status.state) ? REFRESH_IDLE_MS : REFRESH_ACTIVE_MS) });
live.start();
