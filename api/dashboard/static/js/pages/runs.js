// All runs: is mine learning, is it fast, is it safe to walk away?

import { get, part } from "../api.js";
import { REFRESH_ACTIVE_MS, REFRESH_IDLE_MS, RUNS_SHOWN, SPARK_POINTS } from "../bounds.js";
import { byId, h, keyed, mark, row, say, svg } from "../dom.js";
import { ago, figure, number, percent, stamp } from "../format.js";
import { Live } from "../live.js";
import { showState } from "../states.js";

const ENDED = new Set(["completed", "failed", "stopped"]);
const table = byId("runs");
const curves = new Map();
let runs = [];
let pages = 1;

async function refresh() {
  const [page, nodes] = await Promise.all([get(`/v1/runs?limit=${RUNS_SHOWN * pages}`), get("/v1/nodes")]);
  runs = page.items;
  await Promise.all(runs.map(readCurve));
  byId("bones").hidden = true;
  table.hidden = runs.length === 0;
  byId("empty").hidden = runs.length > 0;
  byId("more").hidden = !page.next_cursor;
  mark(table, "aria-busy", false);
  summarise(nodes.items);
  keyed(table.tBodies[0], runs, (run) => run.id, createRow, updateRow);
}

async function readCurve(run) {
  const curve = curves.get(run.id) ?? { last: -1, points: [], done: false };
  curves.set(run.id, curve);
  if (curve.done || curve.last >= run.status.head_version) return;
  const answer = await get(`/v1/runs/${part(run.id)}/metrics?names=reward/mean&after_step=${curve.last}`);
  curve.points.push(...(answer.series["reward/mean"] ?? []).map(([, value]) => value));
  curve.last = answer.last_step;
  curve.done = ENDED.has(run.status.state) && curve.last >= run.status.head_version;
}

function summarise(nodes) {
  const count = (state) => runs.filter((run) => run.status.state === state).length;
  const states = ["running", "recovering", "starting", "paused", "failed", "completed"].filter(count).map((state) => `${count(state)} ${state}`);
  const ready = nodes.filter((node) => node.state === "ready").length;
  const open = runs.reduce((sum, run) => sum + run.status.open_incidents, 0);
  const incidents = open ? `${open} open incident${open > 1 ? "s" : ""}` : "nothing is broken";
  say(byId("summary"), [...states, `${ready} of ${nodes.length} nodes ready`, incidents].join(" · "));
}

function createRow(run) {
  const line = row(table, [1]);
  const cells = line.cells;
  cells[0].append(h("span", { class: "pill" }));
  cells[1].append(h("a", { class: "name", href: `/runs/${run.id}` }, run.name), h("span", { class: "sub" }));
  cells[2].append(h("span"), h("span", { class: "meter" }, h("i")));
  cells[3].append(h("span", { class: "withspark" }, h("b"), spark()));
  return line;
}

function updateRow(line, run) {
  const { status } = run;
  const cells = line.cells;
  showState(cells[0].firstElementChild, status.state);
  say(cells[1].lastElementChild, ["running", "completed"].includes(status.state) || !status.reason ? run.spec.model : status.reason);
  say(cells[2].firstElementChild, `${Math.max(0, status.head_version)} / ${status.max_steps}`);
  cells[2].querySelector("i").style.width = `${(100 * Math.max(0, status.head_version)) / status.max_steps}%`;
  say(cells[3].querySelector("b"), figure(status.reward));
  drawSpark(cells[3].querySelector("svg"), curves.get(run.id).points);
  say(cells[4], number(status.tokens_per_s));
  say(cells[5], status.staleness_max === null ? "–" : `${number(status.staleness_mean, 1)} / ${number(status.staleness_max)}`);
  mark(cells[5], "title", "mean / max, in versions");
  say(cells[6], number(status.recoveries));
  say(cells[7], percent(status.ettr));
  say(cells[8], ago(run.started_at ?? run.created_at));
  mark(cells[8], "title", stamp(run.started_at ?? run.created_at));
}

function spark() {
  return svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: "under" }), svg("path", { class: "over" }));
}

function drawSpark(element, all) {
  const stride = Math.max(1, Math.ceil(all.length / SPARK_POINTS));
  const points = all.filter((_, index) => (all.length - 1 - index) % stride === 0);
  const low = Math.min(...points);
  const span = Math.max(...points) - low || 1;
  const step = 100 / Math.max(1, points.length - 1);
  const line = points.length < 2 ? "" : points.map((value, index) => `${index ? "L" : "M"}${(index * step).toFixed(1)} ${(28 - (26 * (value - low)) / span).toFixed(1)}`).join("");
  mark(element.lastElementChild, "d", line);
  mark(element.firstElementChild, "d", line && `${line}L100 30L0 30Z`);
}

byId("more").addEventListener("click", () => { pages += 1; live.soon(); });
const live = new Live({ refresh, periodMs: () => (runs.some((run) => !ENDED.has(run.status.state)) ? REFRESH_ACTIVE_MS : REFRESH_IDLE_MS) });
live.start();
