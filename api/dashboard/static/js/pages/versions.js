// The chain of a run: what each version weighs, what stands beside it, and when it was committed.

import { get, part } from "../api.js";
import { REFRESH_ACTIVE_MS, REFRESH_IDLE_MS, VERSIONS_SHOWN } from "../bounds.js";
import { byId, h, keyed, mark, row, say } from "../dom.js";
import { ago, bytes, figure, number, percent, stamp } from "../format.js";
import { Live, notify } from "../live.js";

const { run } = document.querySelector("main").dataset;
const table = byId("versions");
const held = new Map();
let cursor = null;
let older = false;
let active = true;

async function refresh() {
  const [found, page] = await Promise.all([get(`/v1/runs/${part(run)}`), get(`/v1/runs/${part(run)}/versions?limit=${VERSIONS_SHOWN}`)]);
  active = found.finished_at === null;
  say(byId("run"), found.name);
  for (const version of page.items) held.set(version.version, version);
  if (!older) cursor = page.next_cursor;
  show(found);
}

function show(found) {
  const versions = [...held.values()].sort((one, other) => other.version - one.version);
  byId("bones").hidden = true;
  byId("none").hidden = versions.length > 0;
  table.hidden = versions.length === 0;
  byId("more").hidden = cursor === null;
  if (found && versions.length) {
    const deltas = versions.filter((version) => version.kind === "delta");
    const mean = deltas.reduce((sum, version) => sum + version.payload_bytes, 0) / Math.max(1, deltas.length);
    const full = versions[0].full_bytes;
    say(byId("summary"), `Head is version ${found.status.head_version} · full size ${bytes(full)}` + (deltas.length ? ` · a delta is ${bytes(mean)} on average, ${percent(full ? mean / full : null)} of it` : ""));
  }
  keyed(table.tBodies[0], versions, (version) => version.version, createRow, updateRow);
}

function createRow(version) {
  const line = row(table, [2]);
  const cells = line.cells;
  const ratio = version.full_bytes ? version.payload_bytes / version.full_bytes : null;
  cells[0].append(h("span", { class: "name" }, number(version.version)));
  cells[1].append(h("span", { class: version.kind === "anchor" ? "tag full" : "tag" }, version.kind));
  cells[2].append(h("span", {}, `${bytes(version.payload_bytes)}${ratio === null ? "" : ` · ${percent(ratio)}`}`), h("span", { class: "meter wide" }, h("i")));
  cells[2].querySelector("i").style.width = `${100 * Math.min(1, ratio ?? 0)}%`;
  say(cells[3], percent(version.density));
  mark(cells[3], "title", `${number(version.changed)} of ${number(version.total)} elements`);
  cells[4].append(h("span", { class: "group" }));
  say(cells[5], figure(version.metrics["reward/mean"]));
  cells[6].append(h("code", { title: version.manifest }, version.manifest.slice(0, 12)));
  return line;
}

function updateRow(line, version) {
  const beside = [version.snapshot ? "snapshot" : "", version.anchor && version.kind !== "anchor" ? "anchor" : ""].filter(Boolean);
  keyed(line.cells[4].firstElementChild, beside.length ? beside : ["–"], (name) => name, (name) => h("span", { class: name === "–" ? "sub" : "tag full" }, name));
  say(line.cells[7], ago(version.committed_at));
  mark(line.cells[7], "title", stamp(version.committed_at));
}

byId("more").addEventListener("click", async () => {
  let page;
  try {
    page = await get(`/v1/runs/${part(run)}/versions?limit=${VERSIONS_SHOWN}&cursor=${encodeURIComponent(cursor)}`);
  } catch (error) {
    notify(`Older versions could not be read: ${error.message}`, "bad");
    return;
  }
  older = true;
  cursor = page.next_cursor;
  for (const version of page.items) held.set(version.version, version);
  show(null);
});
new Live({ run, refresh, periodMs: () => (active ? REFRESH_ACTIVE_MS : REFRESH_IDLE_MS) }).start();
