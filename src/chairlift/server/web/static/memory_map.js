/** The KV memory map: one cell for each block. */

import { color, describeCanvas, ownerColor, prepare, showTooltip } from "./canvas.js";
import { formatCount, formatPercent, isForeign, plural, shortId } from "./format.js";
import { translate } from "./language.js";

const MAX_HEIGHT = 240;
const MAX_CELL = 16;

/**
 * A block with its owners.
 *
 * @typedef {object} Block
 * @property {number} id
 * @property {import("./engine_state.js").TrackedRequest[]} owners
 * @property {number} position the index of the block in the table of its first owner
 * @property {boolean} isCached
 * @property {boolean} isExternal whether no request holds it and the first one of the queue cannot get it
 * @property {import("./engine_state.js").TrackedRequest} [roundedFor] the request whose reservation was rounded up to it
 */

export class MemoryMapView {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {HTMLElement} status receives the text of the block that the keyboard has reached
   * @param {(id: string|null) => void} onSelect
   */
  constructor(canvas, status, onSelect) {
    this.canvas = canvas;
    this.status = status;
    this.onSelect = onSelect;
    this.cursor = null;
    canvas.addEventListener("keydown", (event) => this.#move(event));
    canvas.addEventListener("blur", () => this.#setCursor(null));
    canvas.addEventListener("mousemove", (event) => this.#hover(event));
    canvas.addEventListener("mouseleave", () => showTooltip([]));
    canvas.addEventListener("click", (event) => this.onSelect(holderOf(this.#blockAt(event))));
  }

  /**
   * @param {import("./engine_state.js").EngineState} state
   * @param {{ by: "owner"|"kind", scope: "used"|"all", selected: string|null }} options
   */
  draw(state, options) {
    this.state = state;
    this.options = options;
    const held = heldBlocks(state);
    this.blocks = options.scope === "all" ? allBlocks(state, held) : usedBlocks(state, held);
    const { cell, perRow } = cells(this.canvas, this.blocks.length, innerWidth < 620 ? MAX_HEIGHT / 2 : MAX_HEIGHT);
    Object.assign(this, { cell, perRow });
    const { context } = prepare(this.canvas, Math.ceil(Math.max(1, this.blocks.length) / perRow) * cell);
    const gap = cell > 4 ? 1 : 0;
    this.blocks.forEach((block, index) => {
      const x = (index % perRow) * cell;
      const y = Math.floor(index / perRow) * cell;
      const isDimmed = options.selected !== null && !block.owners.some((owner) => owner.id === options.selected);
      context.globalAlpha = isDimmed && block.owners.length ? 0.28 : 1;
      this.#drawBlock(context, block, x, y, cell - gap, options.by);
    });
    context.globalAlpha = 1;
    this.#drawCursor(context);
    describeCanvas(this.canvas, state.started ? useText(memoryUse(state, held)) : translate("No engine yet."));
  }

  #drawBlock(context, block, x, y, size, by) {
    const owner = block.owners.find((entry) => !entry.isDone && entry.state === "running") ?? block.owners[0];
    if (!owner) {
      context.fillStyle = color(block.isExternal ? "--external" : block.isCached ? "--cached" : "--cell-empty");
      context.fillRect(x, y, size, size);
      if (block.isExternal) drawPattern(context, "external", x, y, size, size);
      return;
    }
    if (by === "owner") {
      context.fillStyle = isForeign(owner.id) ? color("--foreign") : ownerColor(owner.order);
      context.fillRect(x, y, size, size);
    } else {
      const { written, reserved } = slotShares(this.state.started, owner, block.position);
      context.fillStyle = color("--internal");
      context.fillRect(x, y, size, size * (1 - written - reserved));
      drawPattern(context, "internal", x, y, size, size * (1 - written - reserved));
      context.fillStyle = color("--reserved");
      context.fillRect(x, y + size * (1 - written - reserved), size, size * reserved);
      drawPattern(context, "reserved", x, y + size * (1 - written - reserved), size, size * reserved);
      context.fillStyle = color("--decode");
      context.fillRect(x, y + size * (1 - written), size, size * written);
    }
    if (block.owners.length > 1) {
      context.fillStyle = color("--text");
      const mark = Math.max(1, size / 3);
      context.fillRect(x + (size - mark) / 2, y + (size - mark) / 2, mark, mark);
    }
  }

  #drawCursor(context) {
    if (!this.blocks[this.cursor]) return;
    const x = (this.cursor % this.perRow) * this.cell;
    const y = Math.floor(this.cursor / this.perRow) * this.cell;
    context.strokeStyle = color("--text");
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, this.cell - 2, this.cell - 2);
    const box = this.canvas.getBoundingClientRect();
    showTooltip(describeBlock(this.blocks[this.cursor]), box.left + x, box.top + y);
  }

  #move(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.perRow, ArrowDown: this.perRow };
    if (!this.blocks?.length) return;
    if (event.key in moves) {
      const next = this.cursor === null ? 0 : this.cursor + moves[event.key];
      this.#setCursor(Math.max(0, Math.min(this.blocks.length - 1, next)));
    } else if (event.key === "Enter" || event.key === " ") {
      this.onSelect(holderOf(this.blocks[this.cursor]));
    } else {
      return;
    }
    event.preventDefault();
  }

  #setCursor(cursor) {
    this.cursor = cursor;
    this.status.textContent = cursor === null ? "" : describeBlock(this.blocks[cursor]).join(", ");
    if (cursor === null) showTooltip([]);
    if (this.state) this.draw(this.state, this.options);
  }

  #blockAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.cell);
    const row = Math.floor((event.clientY - box.top) / this.cell);
    return column >= this.perRow ? undefined : this.blocks?.[row * this.perRow + column];
  }

  #hover(event) {
    const block = this.#blockAt(event);
    showTooltip(block ? describeBlock(block) : [], event.clientX, event.clientY);
  }
}

/** Draw one cell for the recurrent state of each seat, and then one for each checkpoint. */
export function drawStates(canvas, state) {
  const { max_num_seqs: seats, num_checkpoints: checkpoints } = state.started;
  const numUsed = state.step?.num_checkpoints ?? 0;
  const fills = state.lanes.map((id) => {
    const owner = id === null ? undefined : state.requests.get(id);
    return owner ? (isForeign(id) ? color("--foreign") : ownerColor(owner.order)) : color("--cell-empty");
  });
  for (let index = 0; index < checkpoints; index++) {
    fills.push(color(index < numUsed ? "--cached" : "--cell-empty"));
  }
  const { cell, perRow } = cells(canvas, seats + checkpoints, MAX_HEIGHT / 2);
  const { context } = prepare(canvas, Math.ceil(fills.length / perRow) * cell);
  fills.forEach((fill, index) => {
    context.fillStyle = fill;
    const size = cell > 4 ? cell - 1 : cell;
    context.fillRect((index % perRow) * cell, Math.floor(index / perRow) * cell, size, size);
  });
}

/** The size of square cells with which so many of them fit, and their number in a row. */
function cells(canvas, count, maxHeight) {
  const width = canvas.parentElement.clientWidth;
  const cell = Math.max(2, Math.min(MAX_CELL, Math.floor(Math.sqrt((width * maxHeight) / Math.max(1, count)))));
  return { cell, perRow: Math.max(1, Math.floor(width / cell)) };
}

const MIN_PATTERN = 6;

/** Mark a kind of slot by more than its colour: reserved has a diagonal, internal a cross, and external a dot. */
function drawPattern(context, kind, x, y, width, height) {
  if (width < MIN_PATTERN || height < MIN_PATTERN) return;
  context.strokeStyle = context.fillStyle = color("--surface");
  context.lineWidth = 1.5;
  context.beginPath();
  if (kind === "external") {
    context.fillStyle = color("--text");
    context.arc(x + width / 2, y + height / 2, width / 7, 0, 7);
    context.fill();
    return;
  }
  context.moveTo(x, y + height);
  context.lineTo(x + width, y);
  if (kind === "internal") {
    context.moveTo(x, y);
    context.lineTo(x + width, y + height);
  }
  context.stroke();
}

/** The content of a block in lines. */
function describeBlock(block) {
  const names = block.owners.slice(0, 4).map((owner) => shortId(owner.id));
  const more = block.owners.length > 4 ? [translate("and {count} more", { count: block.owners.length - 4 })] : [];
  const text = block.owners.length ? heldText(block.owners.length) : unheldText(block);
  return [translate("block {id}: {text}", { id: formatCount(block.id), text }), ...names, ...more];
}

function heldText(count) {
  return count > 1 ? translate("shared by {count} requests", { count }) : translate("held by one request");
}

function unheldText({ isCached, isExternal, roundedFor }) {
  const text = translate(isCached ? "free, holds a cached prefix" : "free");
  if (!isExternal) return text;
  if (!roundedFor) return translate("{text}, but not enough for the first waiting request (external fragmentation)", { text });
  return translate("lost to rounding for {request} (external fragmentation)", { request: shortId(roundedFor.id) });
}

/** The id of the request that a click on a block selects. */
function holderOf(block) {
  return (block?.owners[0] ?? block?.roundedFor)?.id ?? null;
}

/** The blocks with owners, by id. */
export function heldBlocks(state) {
  /** @type {Map<number, Block>} */
  const held = new Map();
  for (const owner of state.running()) {
    owner.blocks.forEach((id, position) => {
      const block = held.get(id);
      if (block) block.owners.push(owner);
      else held.set(id, { id, owners: [owner], position, isCached: false, isExternal: false });
    });
  }
  return held;
}

/** The blocks in no table by which a buddy allocator rounds reservations up to a power of two, by id, with the requests. */
export function roundingBlocks(state) {
  const lost = new Map();
  if (state.started?.kv_arena !== "buddy") return lost;
  for (const request of state.running()) {
    const { blocks } = request;
    if (!blocks.length) continue;
    const size = 2 ** Math.ceil(Math.log2(blocks.length));
    for (let id = blocks[0] + blocks.length; id < blocks[0] + size; id++) lost.set(id, request);
  }
  return lost;
}

/** The blocks that requests hold, then external fragmentation, and then cached prefixes. */
function usedBlocks(state, held) {
  const others = allBlocks(state, held).filter((block) => !block.owners.length && (block.isExternal || block.isCached));
  return [...held.values(), ...others.sort((one, other) => Number(other.isExternal) - Number(one.isExternal))];
}

function allBlocks(state, held) {
  const blocks = [];
  const rounding = roundingBlocks(state);
  const isShort = isShortOfMemory(state);
  for (let id = 0; id < (state.started?.num_blocks ?? 0); id++) {
    const roundedFor = rounding.get(id);
    const isExternal = isShort || roundedFor !== undefined;
    blocks.push(held.get(id) ?? { id, owners: [], position: 0, isCached: state.cached[id] === 1, isExternal, roundedFor });
  }
  return blocks;
}

/**
 * The use of the pool, which all texts of the page share: blocks in use hold requests, and the other ones are lost to
 * rounding, unusable for the first waiting request, or free. Cached prefixes are in free blocks.
 */
export function memoryUse(state, held = heldBlocks(state)) {
  const { num_blocks: total, block_size: size, kv_windows: windows } = state.started;
  const rounding = roundingBlocks(state).size;
  const rest = total - held.size - rounding;
  const unusable = isShortOfMemory(state) ? rest : 0;
  const use = { total, held: held.size, rounding, unusable, free: rest - unusable };
  use.slots = { token_states: 0, reserved: 0, internal: 0, external: size * (rounding + unusable), free: size * use.free };
  for (const { owners, position } of held.values()) {
    const owner = owners.find((entry) => !entry.isDone && entry.state === "running") ?? owners[0];
    const { written, reserved } = slotShares(state.started, owner, position);
    use.slots.token_states += Math.round(size * written);
    use.slots.reserved += Math.round(size * reserved);
  }
  use.slots.internal = size * held.size - use.slots.token_states - use.slots.reserved;
  // The map does not divide the blocks of layers with windows.
  if (windows.length > 1 && state.running().length) for (const kind of Object.keys(use.slots)) use.slots[kind] = state.step[kind];
  return use;
}

/** The use of the pool in words. */
export function useText({ total, held, rounding, unusable, free }) {
  const share = total ? translate(" ({share})", { share: formatPercent(held / total) }) : "";
  const parts = [translate("{blocks} of {total} in use{share}", { blocks: plural(held, "block"), total: formatCount(total), share })];
  if (rounding) parts.push(translate("{count} lost to rounding (external)", { count: formatCount(rounding) }));
  if (unusable) parts.push(translate("{count} not enough for the first waiting request (external)", { count: formatCount(unusable) }));
  return [...parts, translate("{count} free", { count: formatCount(free) })].join(translate(", "));
}

/** Whether free blocks are external fragmentation: the first request of the queue waits for memory. */
function isShortOfMemory(state) {
  const head = state.requests.get(state.head);
  return ["memory", "preemption"].includes(state.step?.wait_reason) && (head?.state ?? "waiting") === "waiting";
}

/**
 * The shares of a block's slots that have K and V (token states), and that will be written (reserved): up to the forced
 * length of the answer, as that of the requests of a burst, or else to the maximum. The rest is internal fragmentation, like all slots of a member of a static batch that is done.
 */
export function slotShares(started, owner, position) {
  if (owner.isDone || owner.state === "finished") return { written: 0, reserved: 0 };
  if (started.kv_windows.length > 1) return { written: 1, reserved: 0 };
  const first = position * started.block_size;
  const share = (numSlots) => Math.max(0, Math.min(1, (numSlots - first) / started.block_size));
  const written = share(owner.computed);
  const last = owner.prompt + (owner.outputLen ?? owner.maxTokens) - 1;
  return { written, reserved: Math.max(0, share(last) - written) };
}
