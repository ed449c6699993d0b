/** The page of the lesson. */

import { formatPercent, plural } from "./format.js";
import { explorerChapter } from "./explorer.js";
import { translate, translatePage } from "./language.js";
import { KINDS, memoryChapter, poolChapter, Shares } from "./memory.js";
import { numAnswered, seatChapter } from "./seats.js";
import { sharingChapter } from "./sharing.js";
import { legend, make, Replay, stageOf } from "./stage.js";

translatePage();

const data = JSON.parse(document.getElementById("lesson-data").textContent);
const titles = Object.fromEntries(data.policies.map(({ name, title }) => [name, translate(title)]));
const replays = Object.fromEntries(Object.entries(data.runs).map(([name, events]) => [name, new Replay(events)]));

document.getElementById("load").textContent = translate(...data.load);

const closed = replays.static;
const numSteps = Math.min(closed.columns.length, replays.max.columns.length);
seatChapter("static", closed, numSteps);
seatChapter("continuous", replays.max, numSteps, (step) => {
  return translate("Static batches had {answers} after this step.", { answers: plural(numAnswered(closed.after(step)), "answer") });
});
memoryChapter(replays, titles);
poolChapter(replays, titles);
sharingChapter(new Replay(data.sharing));
explorerChapter(data.explorer);
showNumbers();

/** A bar with the kinds of slots for each policy, measured and published. */
function showWaste() {
  const stage = stageOf("numbers");
  stage.append(make("h3", { textContent: translate("Where the KV memory goes") }));
  legend(stage, KINDS.map(([, name, letter, label]) => [name, label, letter]));
  for (const { title, measured, published } of data.bars) {
    for (const [source, values] of [["measured", measured], ["published", published]]) {
      const known = KINDS.filter(([kind]) => kind in values);
      if (!known.length) continue;
      const shares = new Shares(known);
      const parts = known.map(([kind, , letter]) => `${letter} ${formatPercent(values[kind])}`).join(translate(", "));
      const text = translate("{title}, {source}: {parts}", { title: translate(title), source: translate(source), parts });
      shares.draw(known.map(([kind]) => values[kind]), text);
      stage.append(make("p", { className: "muted bar-title", textContent: text }), shares.element);
    }
  }
}

function showNumbers() {
  const head = make("tr", {}, make("th", { scope: "col" }), ...Object.values(titles).map((title) => make("th", { scope: "col", textContent: title })));
  const rows = data.rows.flatMap(({ label, measured, published }) => {
    const row = make("tr", {}, make("th", { scope: "row", textContent: translate(label) }), ...measured.map((text) => make("td", { textContent: text })));
    if (!published.length) return [row];
    const cells = published.map((text) => make("td", { textContent: translate(text) || "–" }));
    return [row, make("tr", { className: "published" }, make("th", { scope: "row", textContent: translate("published") }), ...cells)];
  });
  const box = make("div", { className: "scroll-x", tabIndex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", translate("Measured and published values"));
  stageOf("numbers").append(box);
  showWaste();
  const reasons = data.reasons.map((reason) => make("li", { textContent: translate(...reason) }));
  stageOf("numbers").append(make("h3", { textContent: translate("Why they differ") }), make("ul", {}, ...reasons));
  const sources = translate("Published: {sources}. {machine}", { sources: translate(data.sources), machine: translate(...data.machine) });
  stageOf("numbers").append(make("p", { className: "muted", textContent: sources }));
}
