/** The page of the lesson. */

import { formatPercent, plural } from "./format.js";
import { explorerChapter } from "./explorer.js";
import { KINDS, memoryChapter, poolChapter, Shares } from "./memory.js";
import { numAnswered, seatChapter } from "./seats.js";
import { sharingChapter } from "./sharing.js";
import { legend, make, Replay, stageOf } from "./stage.js";

const data = JSON.parse(document.getElementById("lesson-data").textContent);
const titles = Object.fromEntries(data.policies.map(({ name, title }) => [name, title]));
const replays = Object.fromEntries(Object.entries(data.runs).map(([name, events]) => [name, new Replay(events)]));

const closed = replays.static;
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

/** A bar with the kinds of slots for each policy, measured and published. */
function showWaste() {
  const stage = stageOf("numbers");
  stage.append(make("h3", { textContent: "Where the KV memory goes" }));
  legend(stage, KINDS.map(([, name, letter, label]) => [name, `${letter}: ${label}`]));
  for (const { title, measured, published } of data.bars) {
    for (const [source, values] of [["measured", measured], ["published", published]]) {
      const known = KINDS.filter(([kind]) => kind in values);
      if (!known.length) continue;
      const shares = new Shares(known);
      const text = `${title}, ${source}: ${known.map(([kind, , letter]) => `${letter} ${formatPercent(values[kind])}`).join(", ")}`;
      shares.draw(known.map(([kind]) => values[kind]), text);
      stage.append(make("p", { className: "muted bar-title", textContent: text }), shares.element);
    }
  }
}

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
  stageOf("numbers").append(box);
  showWaste();
  const reasons = data.reasons.map((text) => make("li", { textContent: text }));
  stageOf("numbers").append(make("h3", { textContent: "Why they differ" }), make("ul", {}, ...reasons));
  stageOf("numbers").append(make("p", { className: "muted", textContent: `Published: ${data.sources}. ${data.machine}` }));
}
