// The end of a worker's log, followed as it grows.

import { get, part, Problem } from "../api.js";
import { LOG_BYTES, REFRESH_ACTIVE_MS, REFRESH_IDLE_MS } from "../bounds.js";
import { byId, h, keyed, mark, say } from "../dom.js";
import { bytes, number } from "../format.js";
import { Live } from "../live.js";

const { run, worker } = document.querySelector("main").dataset;
const log = byId("log");
let text = "";

async function refresh() {
  const [found, workers] = await Promise.all([get(`/v1/runs/${part(run)}`), get(`/v1/runs/${part(run)}/workers`)]);
  say(byId("run"), found.name);
  keyed(byId("tabs"), workers.items, (one) => one.worker, (one) => h("a", { href: `/runs/${part(run)}/workers/${part(one.worker)}/logs`,
    "aria-current": one.worker === worker ? "page" : null }, one.worker));
  try {
    const answer = await get(`/v1/runs/${part(run)}/workers/${part(worker)}/logs?tail=${LOG_BYTES}`);
    text = answer.text;
    const cut = answer.size_bytes > LOG_BYTES ? `, the last ${bytes(LOG_BYTES)} shown` : "";
    say(byId("summary"), `On ${answer.node}, epoch ${answer.epoch} · ${bytes(answer.size_bytes)}${cut}`);
  } catch (error) {
    if (!(error instanceof Problem)) throw error; // its node may be away; the page itself is fine
    say(byId("summary"), [error.message, error.hint].filter(Boolean).join(" "));
  }
  show();
}

function show() {
  const wanted = byId("filter").value.toLowerCase();
  const lines = text.split("\n");
  const kept = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
  const shown = kept.join("\n");
  mark(byId("filter"), "title", wanted ? `${number(kept.length)} of ${number(lines.length)} lines` : null);
  if (log.textContent === shown) return;
  log.textContent = shown;
  if (byId("follow").checked) log.scrollTop = log.scrollHeight;
}

byId("filter").addEventListener("input", show);
byId("wrap").addEventListener("change", (event) => log.classList.toggle("wrapped", event.target.checked));
byId("follow").addEventListener("change", () => { if (byId("follow").checked) log.scrollTop = log.scrollHeight; });
log.classList.add("wrapped");
new Live({ run, refresh, periodMs: () => (byId("follow").checked ? REFRESH_ACTIVE_MS : REFRESH_IDLE_MS) }).start();
