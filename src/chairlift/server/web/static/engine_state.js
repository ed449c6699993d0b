/** The state of an engine at one moment, computed from its events alone (see docs/guide/events.md). */

import { translate } from "./language.js";
import { WORDS } from "./words.js";

export const EMPTY = 0;
export const PREFILL = 1;
export const DECODE = 2;
export const FINISHED = 3;
export const PREEMPTED = 4;
export const PADDING = 5;
export const IDLE = 6;

/** The names of the kinds of cells, by their number. */
export const CELL_NAMES = ["cell-empty", "prefill", "decode", "finished", "preempted", "padding", "cell-idle"].map((kind) => translate(WORDS[kind]));

const MAX_ENDED = 2000;

/**
 * @typedef {object} TrackedRequest
 * @property {string} id
 * @property {string} state "waiting", "running", "finished" or "rejected"
 * @property {number|null} lane the seat, while it is in the batch
 * @property {number[]} blocks
 * @property {boolean} isOver whether it has ended and no later event changes it
 * @property {boolean} isDone whether it only waits for the end of its static batch
 */

/**
 * One step of the batch, with one cell for each lane.
 *
 * @typedef {object} Column
 * @property {number} step
 * @property {number} start seconds of the engine's clock
 * @property {number} end
 * @property {Uint8Array} kinds by lane
 * @property {(string|null)[]} ids by lane
 * @property {Uint16Array} tokens computed tokens by lane
 */

/** Whether a request that ended met its SLO; null if it has none, or was aborted before its first token. */
function metSlo(event, slo) {
  if (slo === null) return null;
  if (event.first_token_time === null) return event.finish_reason === "abort" ? null : false;
  if (event.finish_reason === "error" || event.finish_reason === "timeout") return false;
  const ttft = event.first_token_time - event.arrival_time;
  const tpot = (event.time - event.first_token_time) / Math.max(1, event.num_output_tokens - 1);
  const hasTpot = slo.tpot_ms !== null && event.num_output_tokens > 1;
  return !(slo.ttft_ms !== null && ttft * 1e3 > slo.ttft_ms) && !(hasTpot && tpot * 1e3 > slo.tpot_ms);
}

export class EngineState {
  constructor() {
    this.started = null;
    this.time = 0;
    this.step = null;
    this.lastStep = -1;
    /** @type {Map<string, TrackedRequest>} */
    this.requests = new Map();
    /** @type {(string|null)[]} */
    this.lanes = [];
    this.leaving = [];
    this.cached = new Uint8Array(0);
    this.maxBlock = -1;
    this.head = null;
    this.order = 0;
    this.numEnded = 0;
  }

  /** A copy that later events of this state do not change. */
  copy() {
    const copy = Object.assign(new EngineState(), this);
    copy.requests = new Map();
    for (const [id, request] of this.requests) {
      copy.requests.set(id, request.isOver ? request : { ...request, blocks: request.blocks.slice() });
    }
    copy.lanes = this.lanes.slice();
    copy.leaving = this.leaving.slice();
    copy.cached = this.cached.slice();
    return copy;
  }

  running() {
    return this.lanes.flatMap((id) => (id === null ? [] : [this.requests.get(id)])).filter(Boolean);
  }

  /** The waiting requests: the first one of the queue, and then the others by arrival. */
  waiting() {
    const found = [...this.requests.values()].filter((request) => request.state === "waiting");
    const isHead = (request) => Number(request.id === this.head);
    return found.sort((a, b) => isHead(b) - isHead(a) || a.order - b.order);
  }

  /**
   * Apply an event.
   *
   * @param {object} event
   * @returns {Column|null} the column of a step, otherwise null
   */
  apply(event) {
    if (event.type === "step") return this.#applyStep(event);
    if (event.type === "engine_started") this.#start(event);
    else if (event.type === "snapshot") this.#restore(event);
    else if (event.type === "request_arrived") this.#add(event);
    else if (event.type === "request_waiting") this.#setWaiting(event.request_id, event);
    else if (event.type === "request_queued") this.#setWaiting(event.request_id, null);
    else if (event.type === "request_finished") this.#finish(event);
    else if (event.type === "request_rejected") this.#reject(event);
    this.time = Math.max(this.time, event.time ?? 0);
    return null;
  }

  #start(event) {
    const isSame = this.started !== null && this.started.time === event.time;
    this.started = event;
    if (isSame) return;
    this.requests.clear();
    this.numEnded = 0;
    this.lanes = new Array(event.max_num_seqs).fill(null);
    this.leaving = [];
    this.cached = new Uint8Array(event.num_blocks);
    this.maxBlock = -1;
    this.step = null;
    this.lastStep = -1;
    this.head = null;
  }

  /** Replace the unfinished requests by those of a snapshot. Known requests keep their lanes. */
  #restore(event) {
    const known = new Set(event.requests.map((entry) => entry.arrived.request_id));
    for (const request of this.requests.values()) {
      if (!known.has(request.id) && (request.state === "running" || request.state === "waiting")) {
        request.state = "finished";
        request.end = event.time;
        this.#end(request);
      }
    }
    this.lastStep = Math.max(this.lastStep, event.step);
    for (const entry of event.requests) {
      const request = this.requests.get(entry.arrived.request_id) ?? this.#add(entry.arrived);
      Object.assign(request, {
        state: entry.state,
        computed: entry.num_computed,
        output: entry.num_output_tokens,
        cachedTokens: entry.num_cached_tokens,
        preemptions: entry.num_preemptions,
        firstScheduled: entry.first_scheduled_time,
        firstToken: entry.first_token_time,
        waitingEvent: entry.waiting,
      });
      if (entry.state === "waiting") this.#leave(request);
      if (entry.state === "running") {
        this.#takeLane(request);
        request.blocks = [];
        this.#hold(request, entry.block_ids);
      }
    }
  }

  #add(event) {
    const request = {
      id: event.request_id,
      tenant: event.tenant,
      state: "waiting",
      lane: null,
      order: this.order++,
      arrival: event.time,
      prompt: event.num_prompt_tokens,
      maxTokens: event.max_tokens,
      outputLen: event.output_len,
      computed: 0,
      isOver: false,
      isDone: false,
      recomputeUntil: 0,
      output: 0,
      cachedTokens: 0,
      preemptions: 0,
      firstScheduled: null,
      firstToken: null,
      lastToken: null,
      end: null,
      finishReason: null,
      message: null,
      blocks: [],
      waitingEvent: null,
      slo: event.slo ?? null,
      metSlo: null,
    };
    this.requests.set(request.id, request);
    return request;
  }

  #setWaiting(id, event) {
    const request = this.requests.get(id);
    if (request) request.waitingEvent = event;
  }

  #finish(event) {
    const request = this.requests.get(event.request_id);
    if (!request) return;
    request.state = "finished";
    request.end = event.time;
    request.finishReason = event.finish_reason;
    request.output = event.num_output_tokens;
    request.cachedTokens = event.num_cached_tokens;
    request.endStep = event.step;
    request.metSlo = metSlo(event, request.slo);
    // The results of its last step, or of the step that admits it, may follow.
    if (this.lastStep + 1 < event.step) this.leaving.push(request.id);
    else this.#end(request);
  }

  #reject(event) {
    const request = this.requests.get(event.request_id) ?? this.#add({ ...event, tenant: "", num_prompt_tokens: 0 });
    request.state = "rejected";
    request.end = event.time;
    request.message = event.message;
    this.#end(request);
  }

  #end(request) {
    this.#leave(request);
    request.isOver = true;
    this.#forgetOld();
  }

  /** Remove the oldest requests that have ended, a tenth of them at a time. */
  #forgetOld() {
    this.numEnded++;
    if (this.numEnded <= 1.1 * MAX_ENDED) return;
    for (const [id, request] of this.requests) {
      if (this.numEnded <= MAX_ENDED) break;
      if (!request.isOver) continue;
      this.requests.delete(id);
      this.numEnded--;
    }
  }

  #applyStep(step) {
    this.step = step;
    this.lastStep = step.step;
    this.head = step.head_id;
    const size = this.lanes.length;
    const preempted = step.preempted.map((id) => this.#preempt(id));
    const computed = new Map();
    step.request_ids.forEach((id, index) => computed.set(id, step.num_computed[index]));
    for (const id of step.admitted) this.#admit(id, step, computed.get(id) ?? 0);
    for (const [id, blocks] of Object.entries(step.released_blocks)) this.#release(this.requests.get(id), blocks);
    for (const [id, blocks] of Object.entries(step.new_blocks)) this.#hold(this.requests.get(id), blocks);
    const column = {
      step: step.step,
      start: step.scheduled_time,
      end: step.time,
      kinds: new Uint8Array(Math.max(size, this.lanes.length)),
      ids: this.lanes.slice(),
      tokens: new Uint16Array(Math.max(size, this.lanes.length)),
    };
    this.lanes.forEach((id, lane) => (column.kinds[lane] = id === null ? EMPTY : IDLE));
    step.request_ids.forEach((id, index) => this.#addRow(id, index, step, column));
    for (const [lane, id] of preempted) {
      if (lane === null || column.ids[lane] !== null) continue;
      column.kinds[lane] = PREEMPTED;
      column.ids[lane] = id;
    }
    this.#removeEnded(step, column);
    this.time = Math.max(this.time, step.time);
    return column;
  }

  #preempt(id) {
    const request = this.requests.get(id);
    if (!request) return [null, id];
    const lane = request.lane;
    this.#leave(request);
    request.recomputeUntil = Math.max(request.recomputeUntil, request.computed);
    request.computed = 0;
    request.preemptions++;
    if (request.state === "running") request.state = "waiting";
    return [lane, id];
  }

  #admit(id, step, numCached) {
    const request = this.requests.get(id);
    if (!request) return;
    if (request.state === "waiting") request.state = "running";
    if (request.firstScheduled === null) {
      request.firstScheduled = step.scheduled_time;
      request.cachedTokens = numCached;
    }
    request.waitingEvent = null;
    this.#takeLane(request);
  }

  #takeLane(request) {
    if (request.lane !== null) return;
    const free = this.lanes.indexOf(null);
    request.lane = free === -1 ? this.lanes.length : free;
    this.lanes[request.lane] = request.id;
  }

  #addRow(id, index, step, column) {
    const request = this.requests.get(id);
    if (!request || request.lane === null) return;
    const count = step.num_scheduled[index];
    const start = step.num_computed[index];
    const numNew = step.num_new[index];
    const drafts = step.num_draft[index] ?? 0;
    const rejected = drafts ? Math.max(0, drafts + 1 - numNew) : 0;
    request.isDone = count === 0;
    request.computed = start + count - rejected;
    if (numNew && request.state !== "finished") request.output += numNew;
    if (numNew) {
      request.previousToken = request.lastToken;
      request.firstToken ??= step.time;
      request.lastToken = step.time;
    }
    const known = Math.max(request.prompt, request.recomputeUntil);
    column.kinds[request.lane] = count === 0 ? PADDING : start < known ? PREFILL : DECODE;
    column.tokens[request.lane] = count || (step.num_padding[index] ?? 0);
  }

  /** Free the lanes of requests that no later step contains, and mark their last cells. */
  #removeEnded(step, column) {
    for (const id of step.finished) {
      const lane = this.requests.get(id)?.lane ?? null;
      if (lane !== null) column.kinds[lane] = FINISHED;
    }
    this.leaving = this.leaving.filter((id) => {
      const request = this.requests.get(id);
      if (request && step.step + 1 < request.endStep) return true;
      if (request) this.#end(request);
      return false;
    });
  }

  #leave(request) {
    if (request.lane !== null && this.lanes[request.lane] === request.id) this.lanes[request.lane] = null;
    request.lane = null;
    this.#release(request, request.blocks);
    request.blocks = [];
  }

  #hold(request, blocks) {
    if (!request) return;
    for (const block of blocks) {
      request.blocks.push(block);
      this.cached[block] = 0;
      if (block > this.maxBlock) this.maxBlock = block;
    }
  }

  /** Blocks that were full stay in the prefix cache until they are allocated again. */
  #release(request, blocks) {
    if (!request || !blocks.length) return;
    const isAll = blocks === request.blocks;
    const released = isAll ? null : new Set(blocks);
    const size = this.started.block_size;
    const hasCache = this.started.enable_prefix_caching && this.started.kv_windows.length === 1;
    request.blocks.forEach((block, index) => {
      if (hasCache && (isAll || released.has(block)) && (index + 1) * size <= request.computed) this.cached[block] = 1;
    });
    if (!isAll) request.blocks = request.blocks.filter((block) => !released.has(block));
  }
}
