// Colour, shape and word of each state: none of the three stands alone.

import { h, icon, mark } from "./dom.js";

const LOOKS = {
  running: ["running", "good"], completed: ["completed", "good"], ready: ["completed", "good"], recovered: ["completed", "good"],
  sound: ["completed", "good"], recovering: ["recovering", "warn"], open: ["warning", "bad"], failed: ["failed", "bad"],
  lost: ["failed", "bad"], exited: ["failed", "bad"], unsound: ["failed", "bad"], unreachable: ["warning", "bad"],
  paused: ["paused", "quiet"], stopped: ["stopped", "quiet"], pending: ["pending", "quiet"], starting: ["starting", "quiet"],
  draining: ["draining", "warn"], cordoned: ["cordoned", "warn"],
};
const SEVERITIES = { info: ["info", "quiet"], warning: ["warning", "warn"], error: ["failed", "bad"] };

/** Makes `element` (a .pill) show a state; the same state twice changes nothing. */
export function showState(element, state, word = state) {
  const wanted = `${state}|${word}`;
  if (element.dataset.shown === wanted) return element;
  const [shape, tone] = LOOKS[state] ?? ["pending", "quiet"];
  element.dataset.shown = wanted;
  mark(element, "data-tone", tone);
  element.replaceChildren(icon(shape), word);
  return element;
}

export const pill = (state, word) => showState(h("span", { class: "pill" }), state, word);
export const severityLook = (severity) => SEVERITIES[severity] ?? SEVERITIES.info;
