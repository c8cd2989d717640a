// Numbers, times and text as people read them. A value that is missing or not a number is a dash.

export const NOTHING = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** 12345 → "12,345". */
export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : NOTHING);

/** Three significant digits, thousands and millions shortened: 0.0123, 45.6, 12.3 k. What rounds up to a unit is one. */
export function number(value) {
  if (!known(value)) return NOTHING;
  const shown = rounded(value);
  const size = Math.abs(shown);
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${significant(shown / (limit === 1e4 ? 1e3 : limit))} ${unit}`;
  }
  return size !== 0 && size < 1e-3 ? shown.toExponential(1).replace(".0e", "e") : significant(shown);
}

const rounded = (value) => (Math.abs(value) >= 1000 && Math.abs(value) < 9999.5 ? Math.round(value) : Number(value.toPrecision(3)));

const significant = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3))));

/** A share of 1 in percent. */
export const percent = (value) => (known(value) ? `${Number((100 * value).toPrecision(3))} %` : NOTHING);

export function bytes(value) {
  if (!known(value)) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1023.5 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value >= 999.5 ? Math.round(value) : Number(value.toPrecision(3))} ${units[unit]}`;
}

/** A duration; one below zero, of a clock that jumped, is none at all. */
export function duration(value) {
  if (!known(value)) return NOTHING;
  const s = Math.max(0, value);
  if (s < 5e-4) return "0 s";
  if (s < 0.9995) return `${Math.round(1000 * s)} ms`;
  if (s < 59.5) return `${s < 9.95 ? Number(s.toFixed(1)) : Math.round(s)} s`;
  if (s < 60) return "1 min 00 s";
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
  return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
}

/** Seconds since the epoch as a time of day. */
export const clock = (at) => (known(at) ? new Date(1000 * at).toLocaleTimeString("en-GB") : NOTHING);

/** Seconds since the epoch as date and time. */
export const moment = (at) => (known(at) ? new Date(1000 * at).toLocaleString("sv-SE") : NOTHING);

/** Names of measurements as words. */
export const words = (name) => name.replaceAll("_", " ");
