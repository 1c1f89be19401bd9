// The fleet timeline: a lane per worker, segments by state and phase, ticks for versions, diamonds for snapshots, and
// under each lane the brackets of its incidents: failed → detected → decided → recovered.
//
// Segments are painted on a canvas in device pixels; brackets are links above it, so that keyboard and reader find them.

import { byId, h, keyed, mark, say } from "./dom.js";
import { clock, duration, millis, sentence } from "./format.js";
import { LOOKS, lookOf, paint } from "./segments.js";

const TOP = 26;
const LANE = 46;
const BAR = 16;
const AXIS = 24;
const FLEET = "fleet";
const GRIDS_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Timeline {
  constructor() {
    this.stage = byId("tl-stage");
    this.canvas = this.stage.querySelector("canvas");
    this.over = this.stage.querySelector(".tl-over");
    this.tip = this.stage.querySelector(".tl-tip");
    this.data = null;
    this.windowS = 600;
    new ResizeObserver(() => this.draw()).observe(this.stage);
    document.addEventListener("themechange", () => { this.draw(); this.#key(); });
    this.stage.addEventListener("pointermove", (event) => this.#hover(event));
    this.stage.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.#key();
  }

  /** `data`: the REST answer. `endMs`: the right edge; `live`: spans without end still go on there. */
  show(data, endMs, live) {
    const lanes = data.lanes.map((lane) => ({ ...lane, spans: settled(lane.spans, live) }));
    const names = new Set(lanes.map((lane) => lane.worker));
    const incidents = data.incidents.map((one) => ({ ...one, lane: names.has(one.worker) ? one.worker : FLEET }));
    if (incidents.some((one) => one.lane === FLEET)) lanes.push({ worker: FLEET, role: "nodes and controller", spans: [] });
    this.data = { lanes, incidents, versions: data.versions.map((one) => ({ ...one, at: millis(one.committed_at) })) };
    this.endMs = endMs;
    this.live = live;
    this.#frame();
  }

  /** Shows the last `windowS` seconds, 0 for all, of what is held already; what is missing comes with the next `show`. */
  zoom(windowS) {
    this.windowS = windowS;
    if (this.data !== null) this.#frame();
  }

  #frame() {
    const first = Math.min(this.endMs - 10000, ...this.data.lanes.flatMap((lane) => lane.spans.map((span) => span.from)));
    this.startMs = Math.max(first, this.windowS ? this.endMs - this.windowS * 1000 : first);
    this.draw();
  }

  x(ms) {
    return ((ms - this.startMs) / (this.endMs - this.startMs)) * this.width;
  }

  draw() {
    if (this.data === null) return;
    const { lanes } = this.data;
    const scale = devicePixelRatio || 1;
    this.width = this.stage.clientWidth;
    const height = TOP + Math.max(1, lanes.length) * LANE + AXIS;
    const pixels = [Math.round(this.width * scale), Math.round(height * scale)];
    if (this.canvas.width !== pixels[0] || this.canvas.height !== pixels[1]) {
      [this.canvas.width, this.canvas.height] = pixels;
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, height);
    this.#axis(pen, height);
    lanes.forEach((lane, index) => this.#lane(pen, lane, TOP + index * LANE));
    this.#versions(pen, height);
    this.#brackets();
    keyed(byId("tl-names"), lanes, (lane) => lane.worker, (lane) => h("div", {}, lane.worker, h("small")), (element, lane) => say(element.lastElementChild, lane.spans.at(-1)?.node || lane.role));
    this.#describe();
  }

  #axis(pen, height) {
    const seconds = (this.endMs - this.startMs) / 1000;
    const step = (GRIDS_S.find((grid) => (grid / seconds) * this.width > 84) ?? 604800) * 1000;
    pen.font = `11px ${css("--sans")}`;
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    for (let at = Math.ceil(this.startMs / step) * step; at <= this.endMs; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      pen.strokeStyle = css("--line");
      pen.beginPath();
      pen.moveTo(x, TOP - 4);
      pen.lineTo(x, height - AXIS + 2);
      pen.stroke();
      pen.fillStyle = css("--faint");
      const label = step < 60000 ? clock(at) : clock(at).slice(0, 5);
      if (x > 26 && x < this.width - 26) pen.fillText(label, x, height - AXIS / 2 + 2);
    }
  }

  #lane(pen, lane, y) {
    pen.fillStyle = css("--sunk");
    if (lane.worker !== FLEET) pen.fillRect(0, y + 4, this.width, BAR);
    for (const span of lane.spans) {
      const to = span.to ?? this.endMs;
      if (to < this.startMs || span.from > this.endMs) continue;
      const left = Math.max(0, this.x(span.from));
      const right = Math.min(this.width, this.x(to));
      paint(pen, lookOf(span), left, y + 4, Math.max(0.75, right - left), BAR);
    }
  }

  #versions(pen, height) {
    const shown = this.data.versions.filter((one) => one.at >= this.startMs && one.at <= this.endMs);
    let free = -Infinity;
    pen.textAlign = "left";
    for (const one of shown) {
      const x = Math.round(this.x(one.at)) + 0.5;
      pen.strokeStyle = css("--accent");
      pen.globalAlpha = 0.55;
      pen.beginPath();
      pen.moveTo(x, 15);
      pen.lineTo(x, 22);
      pen.stroke();
      if (one.snapshot) {
        pen.globalAlpha = 0.28;
        pen.beginPath();
        pen.moveTo(x, 22);
        pen.lineTo(x, height - AXIS);
        pen.stroke();
        pen.globalAlpha = 1;
        diamond(pen, x, 18.5, 4.5, css("--accent-deep"));
      }
      pen.globalAlpha = 1;
      const label = `v${one.version}`;
      const wide = pen.measureText(label).width;
      if (x - wide / 2 > free + 22 && x - wide / 2 > 0 && x + wide / 2 < this.width) {
        pen.fillStyle = css("--faint");
        pen.fillText(label, x - wide / 2, 7);
        free = x + wide / 2;
      }
    }
  }

  #brackets() {
    const place = new Map(this.data.lanes.map((lane, index) => [lane.worker, index]));
    const shown = this.data.incidents.map((one) => this.#edges(one)).filter((one) => one.end >= this.startMs && one.begin <= this.endMs);
    keyed(this.over, shown, (one) => one.id, (one) => h("a", { class: "bracket", href: `/incidents/${one.id}` },
      h("i", { class: "detect" }), h("i", { class: "decide" }), h("i", { class: "recover" }), h("span")), (element, one) => {
      const left = Math.max(-4, this.x(one.begin));
      const cut = (ms) => Math.max(left, this.x(ms));
      const [detected, decided, end] = [cut(one.detected), cut(one.decided), cut(one.end)];
      element.style.left = `${left}px`;
      element.style.top = `${TOP + place.get(one.lane) * LANE + 4 + BAR + 3}px`;
      [detected - left, decided - detected, end - decided].forEach((wide, index) => { element.children[index].style.width = `${Math.max(0, wide)}px`; });
      mark(element, "data-open", one.open);
      mark(element, "data-flip", end > this.width - 76);
      say(element.lastElementChild, one.open ? `${duration((one.end - one.begin) / 1000)}…` : duration((one.end - one.begin) / 1000));
      mark(element, "aria-label", told(one));
    });
  }

  /** The four moments in ms; what is unknown yet is where the next known one is. */
  #edges(one) {
    const open = one.recovered_at === null;
    const end = millis(one.recovered_at) ?? this.endMs;
    const begin = millis(one.failed_at) ?? millis(one.detected_at) ?? end;
    const detected = millis(one.detected_at) ?? begin;
    return { ...one, open, begin, detected, decided: millis(one.decided_at) ?? detected, end };
  }

  #hover(event) {
    if (this.data === null) return;
    const box = this.stage.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const ms = this.startMs + (x / this.width) * (this.endMs - this.startMs);
    const lines = this.#found(event, x, y, ms);
    this.tip.hidden = lines === null;
    if (lines === null) return;
    this.tip.replaceChildren(h("b", {}, lines[0]), ...lines.slice(1).map((line) => h("div", {}, line)));
    this.tip.style.left = `${Math.min(Math.max(4, x + 14), Math.max(4, this.width - this.tip.offsetWidth - 4))}px`;
    this.tip.style.top = `${Math.min(y + 16, Math.max(0, box.height - this.tip.offsetHeight - 2))}px`;
  }

  #found(event, x, y, ms) {
    const link = event.target.closest(".bracket");
    if (link) {
      const one = this.#edges(this.data.incidents.find((each) => each.id === link.dataset.key));
      return [sentence(one.kind), one.message, told(one).split(": ").at(-1)];
    }
    if (y < TOP) {
      const near = this.data.versions.filter((one) => Math.abs(this.x(one.at) - x) < 5).at(-1);
      return near ? [`Version ${near.version}`, `committed ${clock(near.at)}`, ...(near.snapshot ? ["with a snapshot"] : [])] : null;
    }
    const lane = this.data.lanes[Math.floor((y - TOP) / LANE)];
    const span = lane?.spans.findLast((one) => one.from <= ms && (one.to ?? this.endMs) >= ms);
    if (!span) return null;
    const to = span.to ?? this.endMs;
    return [`${lane.worker}: ${LOOKS[lookOf(span)].word}`, `${clock(span.from)} – ${span.to ? clock(to) : "now"} (${duration((to - span.from) / 1000)})`,
      span.node ? `on ${span.node}${span.epoch ? `, epoch ${span.epoch}` : ""}` : "not placed yet"];
  }

  #describe() {
    const lanes = this.data.lanes.filter((lane) => lane.spans.length).map((lane) => `${lane.worker} ${LOOKS[lookOf(lane.spans.at(-1))].word}`);
    mark(this.canvas, "aria-label", `Fleet timeline from ${clock(this.startMs)} to ${clock(this.endMs)}. Now: ${lanes.join(", ") || "no worker"}. ${this.data.incidents.length} incidents.`);
  }

  #key() {
    const items = Object.entries(LOOKS).filter(([, look]) => look.key);
    byId("tl-key").replaceChildren(...items.map(([name, look]) => {
      const sample = h("canvas", { width: 32, height: 24, "aria-hidden": "true" });
      const pen = sample.getContext("2d");
      pen.scale(2, 2);
      paint(pen, name, 0, 0, 16, 12);
      return h("li", {}, sample, look.word);
    }));
  }
}

/** Spans with their times in ms. A worker that exits because its run is over is not down: it has stopped. */
function settled(spans, live) {
  const over = (next) => (next ? next.state === "stopped" : !live);
  return spans.map((span, index) => ({
    ...span, state: span.state === "exited" && over(spans[index + 1]) ? "stopped" : span.state,
    from: millis(span.started_at), to: millis(span.ended_at),
  }));
}

function told(one) {
  const took = (from, to) => duration((to - from) / 1000);
  const recover = one.open ? `recovering for ${took(one.decided, one.end)}` : `recover ${took(one.decided, one.end)}`;
  return `${sentence(one.kind)} ${one.worker || one.node}: detect ${took(one.begin, one.detected)}, decide ${took(one.detected, one.decided)}, ${recover}`;
}

function diamond(pen, x, y, size, color) {
  pen.fillStyle = color;
  pen.beginPath();
  pen.moveTo(x, y - size);
  pen.lineTo(x + size, y);
  pen.lineTo(x, y + size);
  pen.lineTo(x - size, y);
  pen.fill();
}
