/** Chapters 1 and 2: the seats of the batch over time. */

import { FINISHED, PADDING, PREFILL } from "./engine_state.js";
import { formatCount, formatPercent, plural } from "./format.js";
import { translate } from "./language.js";
import { WORDS } from "./words.js";
import { Facts, legend, make, numberOf, Player, Replay, stageOf } from "./stage.js";

const MAX_QUEUE = 12;
const IS_DONE =
  "Its answer is complete, but the batch ends with its longest answer: until then the request keeps its seat and its memory.";

/**
 * The stays of requests in seats, each with its parts: consecutive steps of one kind.
 *
 * @param {Replay} replay
 * @param {number} numSteps
 */
export function staysOf(replay, numSteps) {
  const open = [];
  const stays = [];
  replay.columns.slice(0, numSteps).forEach((column, index) => {
    column.ids.forEach((id, seat) => {
      if (open[seat] && open[seat].id !== id) open[seat] = null;
      if (id === null) return;
      if (!open[seat]) stays.push((open[seat] = { id, seat, first: index, last: index, parts: [] }));
      const stay = open[seat];
      const part = stay.parts.at(-1);
      const kind = column.kinds[seat] === FINISHED && part ? part.kind : (KIND_NAMES[column.kinds[seat]] ?? "decode");
      if (part?.kind === kind) part.length++;
      else stay.parts.push({ kind, length: 1 });
      stay.last = index;
    });
  });
  return stays;
}

const KIND_NAMES = { [PREFILL]: "prefill", [PADDING]: "idle" };

class SeatChart {
  constructor(stage, replay, numSteps, onSelect) {
    this.numSteps = numSteps;
    this.covers = [];
    const rows = Array.from({ length: replay.numSeats }, (_, seat) => {
      const cover = make("div", { className: "cover" });
      this.covers.push(cover);
      return make("div", { className: "track" }, cover);
    });
    const first = replay.after(1);
    const padding = translate(WORDS.padding).replace(/（.*）/, "");  // The legend has the term in brackets too.
    this.bars = staysOf(replay, numSteps).map((stay) => {
      const length = stay.last + 1 - stay.first;
      const name = numberOf(first.requests.get(stay.id));
      const parts = stay.parts.map(({ kind, length }) => {
        const textContent = kind === "idle" && length > 0.1 * numSteps ? padding : "";
        const element = make("span", { className: `part ${kind}`, textContent });
        element.style.flexGrow = length;
        return element;
      });
      const label = make("b", { textContent: name });
      const bar = make("button", { type: "button", className: Number(name) % 2 ? "stay odd" : "stay" }, ...parts, label);
      bar.style.left = `${(100 * stay.first) / numSteps}%`;
      bar.style.width = `${(100 * length) / numSteps}%`;
      const place = { name, seat: stay.seat + 1, first: stay.first + 1, last: stay.last + 1 };
      bar.setAttribute("aria-label", translate("Request {name} in seat {seat}, steps {first} to {last}", place));
      bar.addEventListener("click", () => onSelect(stay.id));
      rows[stay.seat].prepend(bar);
      return { bar, stay };
    });
    const labelled = rows.map((row, seat) => make("div", { className: "seat" }, make("span", { textContent: `${seat + 1}` }), row));
    stage.append(make("div", { className: "seats" }, ...labelled));
  }

  draw(step, selected) {
    for (const { bar, stay } of this.bars) {
      bar.hidden = stay.first >= step;
      bar.classList.toggle("selected", stay.id === selected);
    }
    for (const cover of this.covers) cover.style.left = `${(100 * step) / this.numSteps}%`;
  }
}

/**
 * A chapter with the seats of one run.
 *
 * @param {string} chapter
 * @param {Replay} replay
 * @param {number} numSteps
 * @param {(state: object) => string} [compare] a sentence about another run after the same step
 */
export function seatChapter(chapter, replay, numSteps, compare = () => "") {
  const stage = stageOf(chapter);
  let selected = null;
  const select = (id) => {
    selected = id === selected ? null : id;
    player.pause();
  };
  const player = new Player(stage, numSteps, draw);
  const caption = make("p", { className: "caption" });
  stage.append(caption);
  const chart = new SeatChart(stage, replay, numSteps, select);
  const queue = make("div", { className: "queue" });
  stage.append(queue);
  legend(stage, [
    ["prefill", translate("{kind}: the prompt", { kind: translate(WORDS.prefill) })],
    ["decode", translate("{kind}: a token in each step", { kind: translate(WORDS.decode) })],
    ["idle", translate("{kind}: nothing useful is computed", { kind: translate(WORDS.padding) })],
  ]);
  const facts = new Facts(stage, "Select a bar or a waiting request.");
  const busy = replay.columns.map(({ ids, kinds }) => ids.filter((id, seat) => id !== null && kinds[seat] !== PADDING).length);

  function draw(step) {
    const state = replay.after(step);
    const total = busy.slice(0, step).reduce((sum, count) => sum + count, 0);
    const idle = 1 - total / (step * replay.numSeats);
    const answered = numAnswered(state);
    const answers = { answers: plural(answered, "answer") };
    const values = {
      busy: busy[step - 1],
      seats: replay.numSeats,
      idle: formatPercent(idle),
      complete: translate(answered === 1 ? "{answers} is complete" : "{answers} are complete", answers),
      comparison: compare(step),
    };
    caption.textContent = translate(
      "{busy} of {seats} seats compute a token. So far {idle} of the seats' time was idle, and {complete}. {comparison}",
      values,
    );
    chart.draw(step, selected);
    drawQueue(queue, state, select);
    const entry = state.requests.get(selected);
    facts.show(entry, state, entry?.isDone ? translate(IS_DONE) : "");
  }
  player.show(Math.round(0.6 * numSteps));
}

export function numAnswered(state) {
  return [...state.requests.values()].filter((entry) => entry.state === "finished").length;
}

function drawQueue(box, state, onSelect) {
  const waiting = state.waiting();
  while (box.children.length < MAX_QUEUE + 1) {
    const button = make("button", { type: "button" });
    button.addEventListener("click", () => onSelect(button.dataset.id));
    box.append(box.children.length ? button : make("span"));
  }
  const [title, ...buttons] = box.children;
  const rest = waiting.length - MAX_QUEUE;
  const count = formatCount(waiting.length);
  title.textContent = translate(waiting.length ? "Queue, {count} waiting:" : "The queue is empty.", { count });
  buttons.forEach((button, index) => {
    button.hidden = index >= waiting.length;
    if (button.hidden) return;
    button.dataset.id = waiting[index].id;
    button.textContent = numberOf(waiting[index]);
    button.setAttribute("aria-label", translate("Waiting request {number}", { number: numberOf(waiting[index]) }));
  });
  box.dataset.more = rest > 0 ? translate("and {count} more", { count: formatCount(rest) }) : "";
}
