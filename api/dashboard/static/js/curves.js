// The curves of a run: which metrics make which plot, and how far they have been read.

import { get, part } from "./api.js";
import { POINTS_MAX } from "./bounds.js";
import { bytes, duration, number } from "./format.js";
import { Plot } from "./plots.js";

const seconds = (value) => duration(value);
const plain = (value) => String(Number(value.toPrecision(3)));
const secondsTick = (value) => (value >= 1 || value === 0 ? `${plain(value)} s` : `${plain(value * 1000)} ms`);

export class Curves {
  /** `marks()`: versions at which something failed. */
  constructor(parent, run, marks) {
    this.run = run;
    this.last = -1;
    this.points = new Map();
    this.fullBytes = null;
    const plot = (options) => new Plot(parent, { ...options, marks });
    this.plots = [
      [plot({ title: "Reward", show: (value) => number(value, 3), tick: plain, floor: 1, bands: [[0, 1, "--accent-wash"]], lines: [
        { label: "p90", color: "--accent-pale", fill: "--accent-wash", edge: true }, { label: "p10", color: "--accent-pale", edge: true },
        { label: "mean", color: "--accent" }] }), ["reward/p90", "reward/p10", "reward/mean"]],
      [plot({ title: "Tokens per second", show: (value) => number(value), tick: compact, lines: [
        { label: "trained", color: "--accent", fill: "--accent-wash" }] }), ["perf/tokens_per_s"]],
      [plot({ title: "Staleness", show: (value) => number(value, 1), tick: plain, floor: 1, lines: [
        { label: "max", color: "--amber-line", dash: [5, 3] }, { label: "mean", color: "--accent" }] }), ["staleness/max", "staleness/mean"]],
      [plot({ title: "Payload per version", show: bytes, tick: tickBytes, log: true, lines: [
        { label: "delta", color: "--accent" }, { label: "full size", color: "--faint", dash: [5, 3] }] }), ["sync/payload_bytes", "full"]],
      [plot({ title: "Sync time", show: seconds, tick: secondsTick, stacked: true, bands: [[1, 0, "--strong"]], lines: [
        { label: "diff and encode", color: "--accent", fill: "--accent-pale" }, { label: "commit", color: "--faint", fill: "--strong" }] }),
        ["sync/encode_s", "sync/publish_s"]],
      [plot({ title: "Step time", show: seconds, tick: secondsTick, stacked: true, bands: [[1, 0, "--sunk"], [2, 1, "--strong"]], lines: [
        { label: "train", color: "--accent", fill: "--accent-pale" }, { label: "wait", color: "--amber-line", fill: "--sunk" },
        { label: "publish", color: "--faint", fill: "--strong" }] }),
        ["time/step", "time/wait_for_batch", "time/publish"]],
    ];
  }

  /** Reads the points after the last ones; true if there were any. */
  async read(head) {
    if (head >= 0 && this.last >= head) return;
    const answer = await get(`/v1/runs/${part(this.run)}/metrics?after_step=${this.last}`);
    for (const [name, points] of Object.entries(answer.series)) {
      for (const [step, value] of points) {
        if (!this.points.has(step)) this.points.set(step, {});
        this.points.get(step)[name] = value;
      }
    }
    if (this.points.size > POINTS_MAX) for (const step of [...this.points.keys()].slice(0, this.points.size - POINTS_MAX)) this.points.delete(step);
    this.last = answer.last_step;
    if (this.fullBytes === null && this.points.size) {
      const newest = await get(`/v1/runs/${part(this.run)}/versions?limit=1`);
      this.fullBytes = newest.items[0]?.full_bytes ?? null;
    }
    this.draw();
  }

  draw() {
    for (const [plot, names] of this.plots) {
      const steps = [...this.points.keys()].filter((step) => names.some((name) => this.#value(step, name) !== null && name !== "full"));
      plot.setData(steps, names.map((name) => steps.map((step) => this.#value(step, name))));
    }
  }

  /** All values of one metric in order. */
  values(name) {
    return [...this.points.values()].map((point) => point[name]).filter((value) => value !== undefined);
  }

  #value(step, name) {
    const point = this.points.get(step);
    const encode = point["sync/encode_ms"];
    const commit = point["sync/publish_ms"];
    if (name === "full") return this.fullBytes;
    if (name === "sync/encode_s") return encode === undefined ? null : encode / 1000;
    if (name === "sync/publish_s") return commit === undefined ? null : commit / 1000;
    if (name === "time/publish") return encode === undefined ? null : (encode + (commit ?? 0)) / 1000;
    return point[name] ?? null;
  }
}

const compact = (value) => (Math.abs(value) >= 1000 ? `${plain(value / 1000)}k` : plain(value));

const tickBytes = (value) => bytes(value).replace(/\.0+ /, " ");
