// Every bound of the pages, with its reason.

/** Plots and tiles are read again at most this often, however many events arrive. */
export const REFRESH_MIN_MS = 1000;
/** And at least this often while something moves: versions are committed without an event of their own. */
export const REFRESH_ACTIVE_MS = 2000;
/** A page on which nothing moves still sees what others change. */
export const REFRESH_IDLE_MS = 10000;
/** One REST answer; after it the controller counts as out of reach. */
export const REQUEST_TIMEOUT_MS = 10000;
/** The stream beats every 10 s: two and a half missed beats are a lost connection. */
export const STREAM_SILENCE_MS = 25000;
/** Waits between tries to reach a lost controller; the last one repeats. */
export const RETRY_MS = [500, 1000, 2000, 3000];
/** The stream is closed in a tab that nobody sees, because a browser allows six connections to one controller. */
export const HIDDEN_CLOSE_MS = 30000;
/** Points kept of one curve; older ones are thinned out. */
export const POINTS_MAX = 20000;
/** Points of a curve on the page of all runs. */
export const SPARK_POINTS = 60;
/** The whole timeline of a long run is large: it is read again less often than the last minutes. */
export const TIMELINE_ALL_MS = 5000;
export const EVENTS_SHOWN = 40;
export const RUNS_SHOWN = 25;
export const INCIDENTS_SHOWN = 50;
export const VERSIONS_SHOWN = 50;
export const LOG_BYTES = 131072;
