// Rows that more than one page shows: incidents, events, and the question before a grave action.

import { post, Lost } from "./api.js";
import { h, icon, mark, row, say } from "./dom.js";
import { age, ago, clock, duration, sentence, since, stamp } from "./format.js";
import { notify } from "./live.js";
import { severityLook, showState } from "./states.js";

/** A row of an incident table; `withRun` when the table spans runs. */
export function incidentRow(table, incident, withRun) {
  const line = row(table, withRun ? [1, 2] : [1]);
  const cells = [...line.cells];
  cells[0].append(h("span", { class: "pill" }));
  cells[1].append(
    h("a", { class: "name", href: `/incidents/${incident.id}` }, `${sentence(incident.kind)}${incident.subject ? ` · ${incident.subject}` : ""}`),
    h("span", { class: "sub" }, incident.cause || incident.message),
  );
  if (withRun) {
    cells[2].append(incident.run_id ? h("a", { href: `/runs/${incident.run_id}` }, incident.run_name ?? incident.run_id) : "all runs");
  }
  return line;
}

export function updateIncidentRow(line, incident) {
  const cells = [...line.cells];
  showState(cells[0].firstElementChild, incident.open ? "open" : "recovered");
  const at = incident.failed_at ?? incident.detected_at;
  say(cells.at(-2), ago(at));
  mark(cells.at(-2), "title", stamp(at));
  say(cells.at(-1), incident.open ? `${age(since(at))} so far` : duration(incident.seconds.total));
}

export function eventItem(event) {
  const [shape, tone] = severityLook(event.severity);
  return h("li", { "data-tone": tone }, h("time", { datetime: event.at, title: stamp(event.at) }, clock(event.at)), icon(shape), h("p", {}, event.message));
}

/**
 * Asks in a dialog; resolves to whether the answer was yes. Each question has a dialog of its own: "close" comes late,
 * and that of an earlier question would answer this one.
 */
export function confirmed(title, text, yes) {
  const dialog = h("dialog", { "aria-labelledby": "ask-title" }, h("form", { method: "dialog" },
    h("h2", { id: "ask-title" }, title), h("p", {}, text),
    h("div", { class: "row" }, h("button", { value: "no" }, "Cancel"), h("button", { class: "grave", value: "yes" }, yes))));
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((answer) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      answer(dialog.returnValue === "yes");
    }, { once: true });
  });
}

/** Posts an action and says how it went. */
export async function act(path, done) {
  try {
    await post(path);
    notify(done);
    return true;
  } catch (error) {
    notify(error instanceof Lost ? "The controller did not answer; look whether it took this before asking again." : [error.message, error.hint].filter(Boolean).join(" "), "bad", 8000);
    return false;
  }
}
