// How a stretch of a worker's life looks: colour and pattern by state and phase, and the word for it.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** `key`: in the legend. `pattern`: solid, line (a thin middle line), hatch or dots. */
export const LOOKS = {
  working: { word: "working", color: "--accent", pattern: "solid", key: true },
  publishing: { word: "publishing", color: "--accent-deep", pattern: "solid", key: true },
  applying: { word: "applying", color: "--accent-deep", pattern: "dots", key: true },
  waiting: { word: "waiting", color: "--accent-pale", pattern: "solid", key: true },
  restoring: { word: "restoring", color: "--amber-line", pattern: "hatch", key: true },
  starting: { word: "starting", color: "--faint", pattern: "hatch", key: true },
  unreachable: { word: "unreachable", color: "--red", pattern: "hatch", key: true },
  exited: { word: "down", color: "--red", pattern: "solid", key: true },
  paused: { word: "paused", color: "--faint", pattern: "line" },
  pending: { word: "not placed", color: "--strong", pattern: "line" },
  stopped: { word: "stopped", color: "--strong", pattern: "line", key: true },
};

const DOWN = new Set(["exited", "failed", "lost"]);

/** The look's name for a span {state, phase}. */
export function lookOf({ state, phase }) {
  if (DOWN.has(state)) return "exited";
  if (state === "starting") return phase === "restoring" ? "restoring" : "starting";
  if (state === "running") return phase === "stopping" ? "stopped" : phase in LOOKS ? phase : "waiting";
  return state in LOOKS ? state : "pending";
}

export function paint(pen, name, x, y, width, height) {
  const { color, pattern } = LOOKS[name];
  pen.fillStyle = css(color);
  pen.strokeStyle = pen.fillStyle;
  if (pattern === "solid") pen.fillRect(x, y, width, height);
  else if (pattern === "line") pen.fillRect(x, y + height / 2 - 1, width, 2);
  else patterned(pen, pattern, x, y, width, height);
}

function patterned(pen, pattern, x, y, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.globalAlpha = 0.3;
  pen.fillRect(x, y, width, height);
  pen.globalAlpha = 1;
  pen.lineWidth = 1.75;
  const gap = 5;
  // Aligned to multiples of the gap, so that the pattern stands still while segments grow.
  const start = Math.floor((x - height) / gap) * gap;
  pen.beginPath();
  for (let at = start; at < x + width; at += gap) {
    if (pattern === "dots") pen.rect(at + height, y + height / 2 - 1, 2, 2);
    else {
      pen.moveTo(at, y + height);
      pen.lineTo(at + height, y);
    }
  }
  pen.stroke();
  pen.restore();
}
