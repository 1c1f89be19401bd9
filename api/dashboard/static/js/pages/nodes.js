// The machines of the cluster, and what may be asked of them.

import { get, part } from "../api.js";
import { REFRESH_ACTIVE_MS } from "../bounds.js";
import { byId, h, keyed, mark, row, say } from "../dom.js";
import { age, bytes, percent, since, stamp } from "../format.js";
import { Live } from "../live.js";
import { act, confirmed } from "../rows.js";
import { showState } from "../states.js";

/** Nodes report every few seconds; from here on the age is shown in red. */
const LATE_S = 10;
const table = byId("nodes");
let names = new Map();

async function refresh() {
  const [nodes, runs] = await Promise.all([get("/v1/nodes"), get("/v1/runs?limit=100")]);
  names = new Map(runs.items.map((run) => [run.id, run.name]));
  byId("bones").hidden = true;
  byId("none").hidden = nodes.items.length > 0;
  table.hidden = nodes.items.length === 0;
  const ready = nodes.items.filter((node) => node.state === "ready").length;
  const slots = nodes.items.reduce((sum, node) => sum + node.slots, 0);
  const used = nodes.items.reduce((sum, node) => sum + node.slots_used, 0);
  say(byId("summary"), `${ready} of ${nodes.items.length} ready · ${used} of ${slots} slots in use`);
  keyed(table.tBodies[0], nodes.items, (node) => node.id, createRow, updateRow);
}

function createRow(node) {
  const line = row(table, [7, 8]);
  const cells = line.cells;
  cells[0].append(h("span", { class: "pill" }));
  cells[1].append(h("span", { class: "name" }, node.id), h("span", { class: "sub" }));
  cells[3].append(h("span"), h("span", { class: "meter" }, h("i")));
  cells[7].append(h("span", { class: "group" }));
  cells[8].append(h("span", { class: "group", role: "group", "aria-label": `Actions for ${node.id}` }, cordonButton(node), drainButton(node)));
  return line;
}

function updateRow(line, node) {
  const cells = line.cells;
  const state = node.draining ? "draining" : node.state === "ready" && !node.schedulable ? "cordoned" : node.state;
  showState(cells[0].firstElementChild, state);
  mark(cells[0], "title", node.reason);
  const gpus = node.gpus ? ` · ${node.gpus} GPU${node.gpus > 1 ? "s" : ""}` : "";
  say(cells[1].lastElementChild, `${node.region} · ${node.cpus} CPUs${gpus} · ${node.address}`);
  const seen = node.lease_age_s ?? since(node.last_seen_at);
  const late = seen === null || seen > LATE_S;
  cells[2].classList.toggle("late", late);
  say(cells[2], seen === null ? "never" : `${age(seen)} ago`);
  mark(cells[2], "title", stamp(node.last_seen_at));
  say(cells[3].firstElementChild, `${node.slots_used} of ${node.slots}`);
  cells[3].querySelector("i").style.width = `${node.slots ? (100 * node.slots_used) / node.slots : 0}%`;
  say(cells[4], percent(node.cpu_ratio, 0));
  say(cells[5], `${bytes(node.memory_available_bytes)} of ${bytes(node.memory_bytes)}`);
  say(cells[6], bytes(node.disk_available_bytes));
  keyed(cells[7].firstElementChild, node.workers.length ? node.workers : [""], (worker) => worker, workerTag);
  const held = state === "draining" || state === "cordoned";
  const [cordon, drain] = cells[8].firstElementChild.children;
  cordon.dataset.verb = held ? "uncordon" : "cordon";
  say(cordon, held ? "Uncordon" : "Cordon");
  drain.disabled = node.draining;
}

function workerTag(name) {
  if (!name) return h("span", { class: "sub" }, "none");
  const [run, worker] = name.split("/");
  return h("a", { class: "tag", href: `/runs/${part(run)}/workers/${part(worker)}/logs`, title: `Log of ${name}` }, `${names.get(run) ?? run} / ${worker}`);
}

function cordonButton(node) {
  return h("button", { class: "small", type: "button", onclick: async (event) => {
    const verb = event.currentTarget.dataset.verb;
    const done = verb === "cordon" ? `${node.id} takes no new workers.` : `${node.id} takes workers again.`;
    if (await act(`/v1/nodes/${part(node.id)}/${verb}`, done)) live.soon();
  } }, "Cordon");
}

function drainButton(node) {
  return h("button", { class: "small", type: "button", onclick: async () => {
    const text = "Its workers move to other nodes, and it takes no new ones until it is uncordoned. What its rollouts have begun is continued elsewhere.";
    if (!(await confirmed(`Drain ${node.id}?`, text, "Drain"))) return;
    if (await act(`/v1/nodes/${part(node.id)}/drain`, `${node.id} is draining.`)) live.soon();
  } }, "Drain");
}

const live = new Live({ refresh, periodMs: () => REFRESH_ACTIVE_MS });
live.start();
