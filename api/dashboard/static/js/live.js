// A page's live link: one event stream that resumes where it broke, and one refresher that reads REST at a bounded rate.
//
// The stream is read with fetch rather than EventSource: kinds of events are open-ended, and the beats, which
// EventSource hides, tell a silent network from a quiet run.

import { Lost, Problem, toLogin } from "./api.js";
import { HIDDEN_CLOSE_MS, REFRESH_MIN_MS, RETRY_MS, STREAM_SILENCE_MS } from "./bounds.js";
import { byId, say } from "./dom.js";
import { clock } from "./format.js";

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

export class Live {
  /**
   * `run`: only its events. `refresh()`: reads and shows everything, throws what `ask` throws.
   * `onEvent(event)`: each new event. `periodMs()`: how often to refresh although no event came.
   */
  constructor({ run = "", refresh, onEvent = () => {}, periodMs }) {
    this.query = run ? `?run=${encodeURIComponent(run)}` : "";
    this.refreshPage = refresh;
    this.onEvent = onEvent;
    this.periodMs = periodMs;
    this.lastId = "";
    this.state = "connecting";
    this.known = null;
    this.due = 0;
    this.broken = null;
  }

  start() {
    document.addEventListener("visibilitychange", () => this.#seen());
    this.#stream();
    this.#refreshes();
  }

  /** Refresh soon: now, or a second after the last time. */
  soon() {
    this.due = 0;
    this.wake?.();
  }

  async #refreshes() {
    for (;;) {
      const began = Date.now();
      if (!document.hidden) await this.#refreshOnce();
      this.due = began + this.periodMs();
      await sleep(REFRESH_MIN_MS - Math.min(REFRESH_MIN_MS, Date.now() - began));
      while (Date.now() < this.due) {
        await Promise.race([sleep(this.due - Date.now()), new Promise((woken) => { this.wake = woken; })]);
      }
    }
  }

  async #refreshOnce() {
    try {
      await this.refreshPage();
      this.known = Date.now();
      if (this.broken === "rest") this.#show("live");
      if (this.state === "problem") this.#show("live");
    } catch (error) {
      if (error instanceof Lost) this.#show("lost", "rest");
      else if (error instanceof Problem) this.#problem(error);
      else throw error;
    }
  }

  async #stream() {
    for (let tries = 0; ; tries += 1) {
      const opened = await this.#readOnce();
      if (opened) tries = 0;
      if (!this.closing) this.#show("lost", "stream");
      if (this.closing) await new Promise((seen) => { this.reopen = seen; });
      else await sleep(RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]);
    }
  }

  /** Reads one stream until it ends; true if it was open. */
  async #readOnce() {
    this.abort = new AbortController();
    let silence = setTimeout(() => this.abort.abort(), STREAM_SILENCE_MS);
    let opened = false;
    try {
      const headers = { Accept: "text/event-stream", ...(this.lastId ? { "Last-Event-ID": this.lastId } : {}) };
      const answer = await fetch(`/v1/events${this.query}`, { headers, signal: this.abort.signal, cache: "no-store" });
      if (answer.status === 401) toLogin();
      if (!answer.ok) return false;
      opened = true;
      const wasLost = this.state === "lost";
      this.#show("live");
      if (wasLost) this.soon();
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return opened;
        clearTimeout(silence);
        silence = setTimeout(() => this.abort.abort(), STREAM_SILENCE_MS);
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) this.#take(block);
      }
    } catch {
      return opened; // the loop above says that the link is lost, and tries again
    } finally {
      clearTimeout(silence);
    }
  }

  #take(block) {
    const fields = Object.fromEntries(block.split("\n").filter((line) => line && !line.startsWith(":"))
      .map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trimStart()]));
    if (fields.id) this.lastId = fields.id;
    if (!fields.data || fields.event === "ready") return;
    this.onEvent(JSON.parse(fields.data));
    this.soon();
  }

  #seen() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => { this.closing = true; this.abort?.abort(); }, HIDDEN_CLOSE_MS);
    } else {
      this.closing = false;
      this.reopen?.();
      this.soon();
    }
  }

  #show(state, broken = null) {
    const was = this.state;
    this.broken = state === "live" ? null : broken;
    if (state === was) return;
    this.state = state;
    const link = byId("link");
    link.dataset.state = state;
    document.body.dataset.link = state;
    say(link.lastElementChild, state === "lost" ? "reconnecting…" : state);
    if (state === "lost") {
      const at = this.known ? `Shown is what was known at ${clock(this.known)}.` : "Nothing could be read yet.";
      notify(`The controller does not answer; trying again. ${at} Runs go on without it.`, "bad", 0);
    } else if (was === "lost") {
      notify("The controller is back.", "good", 3000);
    } else if (was === "problem") {
      byId("notice").hidden = true;
    }
  }

  #problem(error) {
    this.state = "problem";
    notify([error.message, error.hint].filter(Boolean).join(" "), "bad", 0);
  }
}

let hiding;

/** One sentence at the bottom of the page; `ms` 0 stays until the next one. */
export function notify(text, tone = "good", ms = 5000) {
  const notice = byId("notice");
  clearTimeout(hiding);
  notice.dataset.tone = tone;
  notice.hidden = false;
  say(notice, text);
  if (ms) hiding = setTimeout(() => { notice.hidden = true; }, ms);
}
