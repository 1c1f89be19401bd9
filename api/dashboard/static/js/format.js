// Numbers, bytes and times as people read them. An unknown value is a dash, never a zero.

export const UNKNOWN = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 0) {
  if (!known(value)) return UNKNOWN;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Three or four significant figures. */
export function figure(value) {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 100) return number(value, 0);
  if (size >= 10) return number(value, 1);
  return number(value, size === 0 ? 0 : 2);
}

export const percent = (ratio, digits = 1) => (known(ratio) ? `${number(ratio * 100, ratio === 1 ? 0 : digits)} %` : UNKNOWN);

export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let index = 0;
  let size = value;
  while (size >= 999.5 && index < units.length - 1) {
    size /= 1000;
    index += 1;
  }
  return `${index === 0 ? number(size) : number(size, size >= 100 ? 0 : size >= 10 ? 1 : 2)} ${units[index]}`;
}

export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 0.0995) return `${number(seconds * 1000)} ms`;
  if (seconds < 10) return `${number(seconds, 1)} s`;
  if (seconds < 60) return seconds < 59.95 ? `${number(seconds, 1)} s` : "1 min 00 s";
  const whole = Math.round(seconds);
  const pair = (value) => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pair(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${pair(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${pair(Math.floor((whole % 86400) / 3600))} h`;
}

/** For "how long ago": whole units, so that it does not flicker. */
export function age(seconds) {
  if (!known(seconds)) return UNKNOWN;
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d`;
}

export const millis = (text) => (text ? Date.parse(text) : null);
export const since = (text, now = Date.now()) => (text ? (now - Date.parse(text)) / 1000 : null);
export const ago = (text) => (text ? `${age(since(text))} ago` : UNKNOWN);

export function clock(moment) {
  if (moment === null || moment === undefined) return UNKNOWN;
  return new Date(moment).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

export const stamp = (moment) => (moment ? `${new Date(moment).toLocaleDateString("en-CA")} ${clock(moment)}` : UNKNOWN);

/** "replayed_steps" → "replayed steps". */
export const words = (name) => name.replaceAll("_", " ");
export const sentence = (name) => words(name).replace(/^./, (first) => first.toUpperCase());
