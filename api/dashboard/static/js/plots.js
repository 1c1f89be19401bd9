// Curves over the policy version, drawn by uPlot in this page's colours; each says its newest values in words.

import uPlot from "../vendor/uplot-1.6.32/uPlot.esm.js";
import { h, say, svg } from "./dom.js";
import { UNKNOWN } from "./format.js";

const HEIGHT = 184;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * One plot. `lines`: [{label, color (a CSS variable), dash?, fill?, edge?: of a band}] in drawing order; `bands`: pairs of
 * line indices to fill between; `show(value)`: a value in words; `floor`: least upper end of the y axis;
 * `stacked`: lines are given as they are and drawn on top of each other; `log`: a logarithmic axis.
 */
export class Plot {
  constructor(parent, { title, lines, bands = [], show, tick = show, floor = 0, stacked = false, log = false, marks = () => [] }) {
    Object.assign(this, { title, lines, bands, show, tick, floor, stacked, log, marks });
    this.values = lines.map(() => []);
    this.steps = [];
    this.at = h("span", { class: "at" });
    this.words = lines.map(() => h("b", {}, UNKNOWN));
    const legend = lines.map((line, index) => h("li", {}, swatch(line), line.label, this.words[index]));
    this.none = h("p", { class: "none" }, "No step is committed yet.");
    this.host = h("div", { class: "canvas", role: "img" }, this.none);
    parent.append(h("section", { class: "card plot", "aria-label": title }, h("header", {}, h("h2", {}, title), this.at), h("ul", {}, ...legend), this.host));
    new ResizeObserver(() => this.chart?.setSize({ width: this.host.clientWidth, height: HEIGHT })).observe(this.host);
    document.addEventListener("themechange", () => this.#rebuild());
  }

  /** `steps`: ascending versions; `values`: for each line an array as long, null where unknown. */
  setData(steps, values) {
    this.steps = steps;
    this.values = values;
    this.none.hidden = steps.length > 0;
    if (steps.length === 0) return;
    if (this.chart) this.chart.setData(this.#drawn());
    else this.#rebuild();
    this.#say(null);
  }

  #drawn() {
    if (!this.stacked) return [this.steps, ...this.values];
    const sums = this.steps.map(() => 0);
    const heights = this.values.map((line) => line.map((value, index) => (sums[index] += value ?? 0)));
    return [this.steps, ...heights];
  }

  #rebuild() {
    this.chart?.destroy();
    this.chart = null;
    if (this.steps.length) this.chart = new uPlot(this.#options(), this.#drawn(), this.host);
  }

  #options() {
    const axis = { stroke: css("--faint"), font: `11px ${css("--sans")}`, grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
    return {
      width: this.host.clientWidth, height: HEIGHT, padding: [10, 8, 0, 0],
      legend: { show: false },
      cursor: { y: false, sync: { key: "run", setSeries: false }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false, range: (_, low, high) => [low, Math.max(high, low + 5)] }, y: this.log ? { distr: 3, range: logRange } : { range: (_, low, high) => range(low, high, this.floor) } },
      axes: [
        { ...axis, size: 26, gap: 4, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000] },
        { ...axis, size: 52, gap: 6, space: 34, ...(this.log ? { splits: decades } : {}), values: (_, ticks) => ticks.map((value) => (value === null ? "" : this.tick(value))) },
      ],
      series: [{}, ...this.lines.map((line) => this.#series(line))],
      bands: this.bands.map(([upper, lower, color]) => ({ series: [upper + 1, lower + 1], fill: `${css(color)}` })),
      hooks: { setCursor: [(chart) => this.#say(chart.cursor.idx)], drawAxes: [(chart) => this.#drawMarks(chart)] },
    };
  }

  #series(line) {
    return {
      stroke: css(line.color), width: line.edge ? 0.75 : 1.75, dash: line.dash, fill: line.fill && !line.edge ? css(line.fill) : undefined,
      points: { show: this.steps.length < 3 }, spanGaps: true,
    };
  }

  /** Dashed verticals where something failed, so that a dent in a curve explains itself. */
  #drawMarks(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = css("--amber-line");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const step of this.marks()) {
      if (step < chart.scales.x.min || step > chart.scales.x.max) continue;
      const x = Math.round(chart.valToPos(step, "x", true));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  #say(index) {
    const at = index ?? this.steps.length - 1;
    say(this.at, this.steps.length ? `version ${this.steps[at]}` : "");
    const told = [];
    this.lines.forEach((line, place) => {
      const value = this.values[place]?.[at];
      const text = typeof value === "number" ? this.show(value) : UNKNOWN;
      say(this.words[place], text);
      told.push(`${line.label} ${text}`);
    });
    if (index === null) this.host.setAttribute("aria-label", `${this.title}: ${told.join(", ")}`);
  }
}

function range(low, high, floor) {
  const bottom = Math.min(0, low ?? 0);
  const top = Math.max(high ?? 0, floor, bottom + 1e-9);
  return [bottom, top + (top - bottom) * 0.06];
}

function logRange(_, low, high) {
  return [10 ** Math.floor(Math.log10(Math.max(1, low ?? 1) / 1.5)), 10 ** Math.ceil(Math.log10(Math.max(10, high ?? 10) * 1.2))];
}

/** A line per power of ten; the lines between them would be most of the picture. */
function decades(_, __, low, high) {
  const first = Math.round(Math.log10(low));
  return Array.from({ length: Math.round(Math.log10(high)) - first + 1 }, (_each, index) => 10 ** (first + index));
}

/** Lines as a stroke with its dashes, areas as a block. */
function swatch(line) {
  const mark = line.fill
    ? svg("rect", { x: 0, y: 1, width: 14, height: 8, rx: 2, fill: `var(${line.fill})`, stroke: `var(${line.color})` })
    : svg("path", { d: "M0 5H14", stroke: `var(${line.color})`, "stroke-width": 2, "stroke-dasharray": (line.dash ?? []).join(" ") || "none" });
  return svg("svg", { viewBox: "0 0 14 10", "aria-hidden": "true" }, mark);
}
