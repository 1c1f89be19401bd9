// The ledger's balance: every prompt group that was issued is somewhere, and none was used twice.

import { byId, facts, h, mark } from "./dom.js";
import { number, sentence } from "./format.js";
import { showState } from "./states.js";

const PLACES = ["consumed", "batched", "buffered", "leased", "pooled", "dropped"];
let shown = "";

export function showAudit(audit) {
  const text = JSON.stringify(audit);
  if (text === shown) return;
  shown = text;
  showState(byId("sound"), audit.sound ? "sound" : "unsound", audit.sound ? "adds up" : "does not add up");
  const stack = h("div", { class: "stack", role: "img" }, ...PLACES.map((place) => h("i", { "data-part": place })));
  for (const bar of stack.children) bar.style.width = `${(100 * audit[bar.dataset.part]) / Math.max(1, audit.issued)}%`;
  mark(stack, "aria-label", PLACES.map((place) => `${audit[place]} ${place}`).join(", "));
  const list = h("dl", { class: "facts" });
  facts(list, PLACES.map((place) => [sentence(place), number(audit[place])]));
  PLACES.forEach((place, index) => mark(list.children[2 * index], "data-part", place));
  byId("audit").replaceChildren(stack, list, h("p", {}, sentenceOf(audit)));
}

function sentenceOf(audit) {
  const dropped = Object.entries(audit.dropped_reasons).map(([reason, count]) => `${count} ${reason}`).join(", ");
  return [
    `${number(audit.issued)} groups were issued; ${audit.balance === 0 ? "each is accounted for" : `${audit.balance} are missing`}.`,
    `${number(audit.trajectories)} trajectories: ${number(audit.trajectories_lost)} lost, ${number(audit.consumed_twice)} used twice, ${number(audit.too_stale)} too stale (the oldest was ${audit.max_staleness} versions behind).`,
    audit.late_results ? `${number(audit.late_results)} late results of replaced workers were refused.` : "",
    dropped ? `Dropped: ${dropped}.` : "",
  ].filter(Boolean).join(" ");
}
