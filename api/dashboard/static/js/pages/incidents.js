// What failed anywhere, newest first.

import { get } from "../api.js";
import { INCIDENTS_SHOWN, REFRESH_IDLE_MS } from "../bounds.js";
import { byId, keyed, say } from "../dom.js";
import { Live } from "../live.js";
import { incidentRow, updateIncidentRow } from "../rows.js";

const table = byId("incidents");
let pages = 1;

async function refresh() {
  const page = await get(`/v1/incidents?limit=${INCIDENTS_SHOWN * pages}`);
  const open = page.items.filter((incident) => incident.open).length;
  say(byId("summary"), open ? `${open} open` : "None is open.");
  byId("bones").hidden = true;
  byId("none").hidden = page.items.length > 0;
  table.hidden = page.items.length === 0;
  byId("more").hidden = !page.next_cursor;
  keyed(table.tBodies[0], page.items, (incident) => incident.id, (incident) => incidentRow(table, incident, true), updateIncidentRow);
}

byId("more").addEventListener("click", () => { pages += 1; live.soon(); });
const live = new Live({ refresh, periodMs: () => REFRESH_IDLE_MS });
live.start();
