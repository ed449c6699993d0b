/** The page of the lesson. */

import { plural } from "./format.js";
import { explorerChapter } from "./explorer.js";
import { memoryChapter, poolChapter } from "./memory.js";
import { numAnswered, seatChapter } from "./seats.js";
import { sharingChapter } from "./sharing.js";
import { make, Replay, stageOf } from "./stage.js";

const data = JSON.parse(document.getElementById("lesson-data").textContent);
const titles = Object.fromEntries(data.policies.map(({ name, title }) => [name, title]));
const replays = Object.fromEntries(Object.entries(data.runs).map(([name, events]) => [name, new Replay(events)]));

const closed = replays["static/exact"];
const numSteps = Math.min(closed.columns.length, replays.max.columns.length);
seatChapter("static", closed, numSteps);
seatChapter("continuous", replays.max, numSteps, (step) => {
  return `Static batches had ${plural(numAnswered(closed.after(step)), "answer")} after this step.`;
});
memoryChapter(replays, titles);
poolChapter(replays, titles);
sharingChapter(new Replay(data.sharing));
explorerChapter(data.explorer);
showNumbers();

function showNumbers() {
  const head = make("tr", {}, make("th", { scope: "col" }), ...data.policies.map(({ title }) => make("th", { scope: "col", textContent: title })));
  const rows = data.rows.flatMap(({ label, measured, published }) => {
    const row = make("tr", {}, make("th", { scope: "row", textContent: label }), ...measured.map((text) => make("td", { textContent: text })));
    if (!published.length) return [row];
    const cells = published.map((text) => make("td", { textContent: text || "–" }));
    return [row, make("tr", { className: "published" }, make("th", { scope: "row", textContent: "published" }), ...cells)];
  });
  const box = make("div", { className: "scroll-x", tabIndex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Measured and published values");
  const reasons = data.reasons.map((text) => make("li", { textContent: text }));
  stageOf("numbers").append(box, make("h3", { textContent: "Why they differ" }), make("ul", {}, ...reasons));
  stageOf("numbers").append(make("p", { className: "muted", textContent: `Published: ${data.sources}. ${data.machine}` }));
}
