/** The batch lanes: one row for each seat, one cell for each step. */

import { color, FONT, prepare, showTooltip } from "./canvas.js";
import { CELL_NAMES, DECODE, EMPTY, FINISHED, IDLE, PADDING, PREEMPTED, PREFILL } from "./engine_state.js";
import { formatCount, formatSeconds, isForeign, plural, shortId } from "./format.js";
import { translate } from "./language.js";

const COLUMN_WIDTH = 5;
const AXIS_HEIGHT = 18;
const LABEL_WIDTH = 26;
const MAX_SEATS_SHOWN = 24;

/** The variable with the colour of each kind of cell. */
export const CELL_COLORS = {
  [EMPTY]: "--cell-empty",
  [PREFILL]: "--prefill",
  [DECODE]: "--decode",
  [FINISHED]: "--finished",
  [PREEMPTED]: "--preempted",
  [PADDING]: "--padding",
  [IDLE]: "--cell-idle",
};

/**
 * @typedef {object} LanesInput
 * @property {import("./engine_state.js").Column[]} columns
 * @property {number} numColumns the number of columns before the shown moment
 * @property {number} numSeats
 * @property {string|null} selected
 * @property {number|null} start the time that the times of steps are relative to, with which later steps are shown faintly;
 *   null for the last step
 */

function drawTick(context, text, x, height) {
  context.fillText(text, x, height - 4);
  context.fillRect(x, height - AXIS_HEIGHT + 1, 1, 4);
}

export class LanesView {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {HTMLElement} status receives the text of the cell that the keyboard has reached
   * @param {(id: string|null) => void} onSelect
   */
  constructor(canvas, status, onSelect) {
    this.canvas = canvas;
    this.status = status;
    this.onSelect = onSelect;
    this.input = null;
    this.cursor = null;
    this.pointer = null;
    canvas.addEventListener("mousemove", (event) => this.#hover(event));
    canvas.addEventListener("mouseleave", () => this.#hover(null));
    canvas.addEventListener("click", (event) => this.#click(event));
    canvas.addEventListener("keydown", (event) => this.#move(event));
    canvas.addEventListener("blur", () => this.#setCursor(null));
  }

  /** @param {LanesInput} input */
  draw(input) {
    this.input = input;
    const numRows = this.#numRows();
    const rowHeight = Math.max(3, Math.min(16, Math.floor((innerWidth < 620 ? 200 : 300) / numRows)));
    const { context, width, height } = prepare(this.canvas, numRows * rowHeight + AXIS_HEIGHT);
    const places = this.#places(width);
    Object.assign(this, { rowHeight, places, numRows });
    context.fillStyle = color("--cell-empty");
    context.fillRect(LABEL_WIDTH, 0, width - LABEL_WIDTH, numRows * rowHeight);
    const gap = rowHeight > 5 ? 1 : 0;
    for (const { column, x, width: columnWidth, isLater } of places) {
      const cellWidth = Math.max(0.5, columnWidth - (columnWidth > 4 ? 1 : 0));
      for (let lane = 0; lane < Math.min(numRows, column.kinds.length); lane++) {
        const kind = column.kinds[lane];
        if (kind === EMPTY) continue;
        const id = column.ids[lane];
        context.globalAlpha = (input.selected === null || id === input.selected ? 1 : 0.28) * (isLater ? 0.22 : 1);
        context.fillStyle = color(isForeign(id) && kind !== PREEMPTED ? "--foreign" : CELL_COLORS[kind]);
        context.fillRect(x, lane * rowHeight, cellWidth, rowHeight - gap);
      }
    }
    context.globalAlpha = 1;
    this.#drawAxes(context, width, height);
    if (this.cursor) this.#drawCursor(context);
    else if (this.pointer) this.#hover(this.pointer);
  }

  #numRows() {
    const { columns, numColumns, numSeats } = this.input;
    if (numSeats <= MAX_SEATS_SHOWN) return Math.max(1, numSeats);
    let used = 0;
    for (let index = Math.max(0, numColumns - 400); index < numColumns; index++) {
      const ids = columns[index].ids;
      for (let lane = ids.length - 1; lane >= used; lane--) if (ids[lane] !== null) used = lane + 1;
    }
    return Math.min(numSeats, Math.max(MAX_SEATS_SHOWN, used + 1));
  }

  #places(width) {
    const { columns, numColumns } = this.input;
    const fit = Math.floor((width - LABEL_WIDTH) / COLUMN_WIDTH);
    const first = Math.max(0, numColumns - fit);
    return columns.slice(first, this.input.start === null ? numColumns : first + fit).map((column, index) => ({
      column,
      x: LABEL_WIDTH + index * COLUMN_WIDTH,
      width: COLUMN_WIDTH,
      isLater: first + index >= numColumns,
    }));
  }

  #drawAxes(context, width, height) {
    context.font = FONT;
    context.fillStyle = color("--muted");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(14 / this.rowHeight);
    for (let lane = 0; lane < this.numRows; lane += every) {
      context.fillText(String(lane), LABEL_WIDTH - 5, Math.max(6, (lane + 0.5) * this.rowHeight));
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    if (this.places.length) this.#drawStepTimes(context, width, height);
    else context.fillText(translate("No step yet."), LABEL_WIDTH + 12, 20);
  }

  /** The index of the last step that is not shown faintly. */
  #current() {
    return Math.max(0, this.places.findLastIndex((place) => !place.isLater));
  }

  /** The times of some steps relative to the last one, or to the start. */
  #drawStepTimes(context, width, height) {
    const first = this.places[0].column.start;
    const end = this.places.at(-1).column.end;
    const origin = this.input.start ?? end;
    const digits = end - first < 2 ? 2 : 1;
    let next = LABEL_WIDTH;
    for (const { column, x } of this.places) {
      if (x < next) continue;
      const text = `${column.end < origin ? "−" : ""}${Math.abs(origin - column.end).toFixed(digits)} s`;
      if (x + context.measureText(text).width > width) break;
      drawTick(context, text, x, height);
      next = x + 90;
    }
  }

  #drawCursor(context) {
    const place = this.places[this.cursor.index];
    if (!place) return;
    context.strokeStyle = color("--text");
    context.lineWidth = 2;
    const y = this.cursor.lane * this.rowHeight;
    context.strokeRect(place.x - 1, y - 1, place.width + 1, this.rowHeight + 1);
    const box = this.canvas.getBoundingClientRect();
    showTooltip(this.#describe(this.cursor), box.left + place.x, box.top + y);
  }

  #cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const lane = Math.floor((event.clientY - box.top) / this.rowHeight);
    if (!this.places || lane < 0 || lane >= this.numRows) return null;
    const index = this.places.findIndex((place) => x >= place.x && x < place.x + place.width);
    return index < 0 ? null : { index, lane };
  }

  #describe({ index, lane }) {
    const { column } = this.places[index];
    const id = column.ids[lane] ?? null;
    const kind = CELL_NAMES[column.kinds[lane] ?? EMPTY];
    const ago = this.places.at(-1).column.end - column.end;
    const { start } = this.input;
    const when =
      start !== null
        ? translate(", {time} after the start", { time: formatSeconds(column.end - start) })
        : ago
          ? translate(", {time} before the last one", { time: formatSeconds(ago) })
          : "";
    const values = { number: formatCount(column.step), time: formatSeconds(column.end - column.start) };
    const lines = [translate("step {number}, {time}", values) + when, translate("seat {lane}", { lane })];
    if (id === null) return [...lines, kind];
    const name = isForeign(id) ? translate("request of another key ({id})", { id }) : shortId(id);
    return [...lines, name, `${kind}, ${plural(column.tokens[lane], "token")}`];
  }

  /** Show the cell under the pointer; null if it has left. The lanes move below it while it rests. */
  #hover(event) {
    this.pointer = event;
    const cell = event && this.#cellAt(event);
    showTooltip(cell ? this.#describe(cell) : [], event?.clientX, event?.clientY);
  }

  #click(event) {
    const cell = this.#cellAt(event);
    this.onSelect(cell ? (this.places[cell.index].column.ids[cell.lane] ?? null) : null);
  }

  #move(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!this.places?.length) return;
    const last = this.places.length - 1;
    const cursor = this.cursor ?? { index: this.#current(), lane: 0 };
    if (event.key === "Enter" || event.key === " ") {
      this.onSelect(this.places[Math.min(cursor.index, last)].column.ids[cursor.lane] ?? null);
    } else if (event.key === "Escape") {
      this.onSelect(null);
    } else if (event.key in moves) {
      const [dx, dy] = this.cursor ? moves[event.key] : [0, 0];
      const index = Math.max(0, Math.min(last, cursor.index + dx));
      this.#setCursor({ index, lane: Math.max(0, Math.min(this.numRows - 1, cursor.lane + dy)) });
    } else {
      return;
    }
    event.preventDefault();
  }

  #setCursor(cursor) {
    this.cursor = cursor;
    this.status.textContent = cursor ? this.#describe(cursor).join(", ") : "";
    if (!cursor) showTooltip([]);
    if (this.input) this.draw(this.input);
  }
}
