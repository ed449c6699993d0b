/** Lines over the last minutes. */

import { color, describeCanvas, FONT, prepare } from "./canvas.js";
import { formatCount, formatPercent, formatSeconds, percentile } from "./format.js";
import { translate } from "./language.js";

const HEIGHT = 84;

/**
 * @typedef {object} Chart
 * @property {string} key the id of its canvas and of its value
 * @property {(bucket: import("./run_history.js").Bucket) => (number|null)[]} values one for each line
 * @property {string[]} colors of the lines
 * @property {(value: number) => string} format
 * @property {number} [idle] the value of seconds without a step
 */

const IDLE_SECONDS = 3.5;

/** @type {Chart[]} */
export const CHARTS = [
  { key: "throughput", values: (b) => [b.tokens], colors: ["--accent"], format: formatCount, idle: 0 },
  { key: "ttft", values: (b) => [percentile(b.ttft, 0.5)], colors: ["--accent"], format: formatSeconds },
  { key: "itl", values: (b) => [b.numGaps ? b.gaps / b.numGaps : null], colors: ["--accent"], format: formatSeconds },
  { key: "batch", values: (b) => [b.running, b.waiting], colors: ["--accent", "--preempted"], format: formatCount, idle: 0 },
  { key: "memory", values: (b) => [b.held], colors: ["--accent"], format: formatPercent, idle: 0 },
];

/**
 * Draw all charts.
 *
 * @param {import("./run_history.js").Bucket[]} buckets of the shown seconds
 * @param {number} end the time at the right edge
 * @param {number} seconds
 */
export function drawCharts(buckets, end, seconds) {
  for (const chart of CHARTS) {
    const canvas = document.getElementById(`chart-${chart.key}`);
    const lines = chart.colors.map((_, index) => line(chart, index, buckets, end));
    const known = lines.flat().flatMap(([, value]) => (value === null ? [] : [value]));
    const last = lines.map((points) => points.findLast(([, value]) => value !== null));
    const texts = last.map((point) => (point && end - point[0] < IDLE_SECONDS ? chart.format(point[1]) : "–"));
    document.getElementById(`value-${chart.key}`).textContent = texts.join(" / ");
    drawChart(canvas, chart, lines, known, end, seconds);
    const [low, high] = [Math.min(...known), Math.max(...known)].map((value) => chart.format(value));
    const described = { values: texts.join(" / "), low, high };
    describeCanvas(canvas, translate(known.length ? "Last value {values}; from {low} to {high}." : "No values.", described));
  }
}

/** The points of a line as pairs of a time and a value, with idle seconds if the chart has a value for them. */
function line(chart, index, buckets, end) {
  const points = [];
  let previous = null;
  for (const bucket of [...buckets, { time: end }]) {
    const isEnd = bucket.tokens === undefined;
    if (chart.idle !== undefined && previous !== null && bucket.time - previous > IDLE_SECONDS) {
      points.push([previous + 1, chart.idle], [isEnd ? end : bucket.time - 1, chart.idle]);
    }
    if (!isEnd) points.push([bucket.time, chart.values(bucket)[index]]);
    previous = bucket.time;
  }
  return points;
}

function drawChart(canvas, chart, lines, known, end, seconds) {
  const { context, width, height } = prepare(canvas, HEIGHT);
  const top = Math.max(...known, chart.key === "memory" ? 0.01 : 0) || 1;
  const bottom = height - 14;
  const x = (time) => width - ((end - time) / seconds) * width;
  const y = (value) => bottom - (value / top) * (bottom - 14);
  context.strokeStyle = color("--line");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, bottom + 0.5);
  context.lineTo(width, bottom + 0.5);
  context.stroke();
  context.font = FONT;
  context.fillStyle = color("--muted");
  context.fillText(known.length ? chart.format(top) : "", 0, 10);
  context.fillText(seconds < 60 ? `−${seconds} s` : `−${seconds / 60} min`, 0, height - 2);
  lines.forEach((points, index) => {
    context.strokeStyle = color(chart.colors[index]);
    context.lineWidth = 1.5;
    context.beginPath();
    let previous = null;
    for (const [time, value] of points) {
      if (value === null) continue;
      const isGap = previous === null || (chart.idle === undefined && time - previous > IDLE_SECONDS);
      if (isGap) context.moveTo(x(time) - 1, y(value));
      context.lineTo(x(time), y(value));
      previous = time;
    }
    context.stroke();
  });
}
