/** Numbers and times as text. */

import { LANGUAGE, translate } from "./language.js";

const integers = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function formatCount(value) {
  return integers.format(value);
}

export function formatPercent(share) {
  const percent = 100 * share;
  return `${percent > 0 && percent < 10 ? percent.toFixed(1) : percent.toFixed(0)} %`;
}

/** Bytes in MiB, or in GiB from 1 GiB on. */
export function formatBytes(bytes) {
  const mebibytes = bytes / 2 ** 20;
  return mebibytes < 1024 ? `${mebibytes.toFixed(mebibytes < 10 ? 1 : 0)} MiB` : `${(mebibytes / 1024).toFixed(1)} GiB`;
}

/** Seconds with a unit that fits: "12 ms", "3.4 s", "2 min 5 s". */
export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 0.9995) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

/** The waits of a request by their reason, the longest one first: its time, and the text of its longest part. */
export function waitsByReason(waits, textOf = (span) => span.text) {
  const byReason = new Map();
  for (const span of waits.flatMap((wait) => wait.spans)) {
    const { reason, start, end } = span;
    const group = byReason.get(reason) ?? { seconds: 0, longest: -1 };
    group.seconds += end - start;
    if (end - start > group.longest) Object.assign(group, { longest: end - start, text: textOf(span) });
    byReason.set(reason, group);
  }
  const groups = [...byReason.values()].sort((one, other) => other.seconds - one.seconds);
  return groups.map(({ seconds, text }) => translate("{seconds}: {text}", { seconds: formatSeconds(seconds), text }));
}

export function formatNumber(value, digits = 1) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits);
}

/** A long request id with its middle left out. */
export function shortId(id) {
  return id.length <= 24 ? id : `${id.slice(0, 13)}…${id.slice(-8)}`;
}

export function isForeign(id) {
  return id.startsWith("other-");
}

export function percentile(values, share) {
  if (!values.length) return null;
  const sorted = values.slice().sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

/** A number with a noun, which has a plural with "s" in English. */
export function plural(count, noun) {
  if (LANGUAGE === "en" && count === 1) return `1 ${noun}`;
  return translate(`{count} ${noun}s`, { count: formatCount(count) });
}
