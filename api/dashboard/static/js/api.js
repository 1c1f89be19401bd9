// Asking the REST API with the session's cookie. Two ways to fail: nobody answered (Lost), or the answer is a problem.

import { REQUEST_TIMEOUT_MS } from "./bounds.js";

/** The controller does not answer. */
export class Lost extends Error {}

/** The controller answered with a problem: its sentence, hint and status. */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `The controller answered ${status}.`);
    this.status = status;
    this.hint = body.hint ?? "";
  }
}

export async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      ...options,
      headers: { Accept: "application/json", ...options.headers },
      signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS),
    });
  } catch (error) {
    throw new Lost(String(error));
  }
  if (answer.status === 401) toLogin();
  if (answer.ok) return answer.status === 204 ? null : answer.json().catch((error) => { throw new Lost(String(error)); });
  throw new Problem(answer.status, await answer.json().catch(() => ({})));
}

export const get = (path) => ask(path);
export const post = (path) => ask(path, { method: "POST" });
export const part = (name) => encodeURIComponent(name);

export function toLogin() {
  location.assign(`/login?next=${encodeURIComponent(location.pathname)}`);
}
