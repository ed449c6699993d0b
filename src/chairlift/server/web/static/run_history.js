/** The events of a run with keyframes, so that the state at any time of it can be computed. */

import { EngineState } from "./engine_state.js";
import { translate } from "./language.js";

const KEYFRAME_EVENTS = 400;
const MAX_KEYFRAMES = 200;
const BUCKET_SECONDS = 1;

/**
 * What happened in one second.
 *
 * @typedef {object} Bucket
 * @property {number} time start of the second
 * @property {number} tokens output tokens
 * @property {number[]} ttft seconds to the first token of requests
 * @property {number} gaps sum of the seconds between tokens; @property {number} numGaps
 * @property {number} running the largest batch
 * @property {number} waiting the longest queue
 * @property {number} held the largest share of the memory that requests hold
 * @property {number} numWithSlo requests with an SLO that ended; @property {number} numMetSlo
 */

export class RunHistory {
  /** @param {number} seconds older events are removed; Infinity keeps all */
  constructor(seconds = Infinity) {
    this.seconds = seconds;
    this.state = new EngineState();
    this.events = [];
    this.removed = 0;
    this.keyframes = [];
    this.keyframeEvents = KEYFRAME_EVENTS;
    this.replayed = null;
    /** @type {import("./engine_state.js").Column[]} */
    this.columns = [];
    /** @type {Bucket[]} */
    this.buckets = [];
    this.ids = new Map();
  }

  get start() {
    return this.columns.length ? this.columns[0].start : this.state.time;
  }

  get end() {
    return this.state.time;
  }

  /** The time of the first step with a queue; undefined without one. */
  get firstQueue() {
    return this.events.find((event) => event.type === "step" && event.num_waiting)?.time;
  }

  /** The number of seats that were used in a log, which does not change. */
  get numSeatsUsed() {
    return (this.seatsUsed ??= this.columns.reduce((most, { ids }) => Math.max(most, 1 + ids.findLastIndex((id) => id !== null)), 1));
  }

  /** @param {object} event */
  add(event) {
    if (event.type === "step") this.#shareIds(event);
    this.#addKeyframe();
    this.events.push(event);
    const column = this.state.apply(event);
    if (column) {
      this.columns.push(column);
      this.#addToBucket(event);
    }
    if (event.type === "request_finished") this.#countSlo(event);
  }

  #countSlo(event) {
    const met = this.state.requests.get(event.request_id)?.metSlo ?? null;
    const bucket = this.buckets.at(-1);
    if (met === null || !bucket) return;
    bucket.numWithSlo += 1;
    bucket.numMetSlo += Number(met);
  }

  /** Keep a copy of the state every few hundred events, and at longer intervals in a long run. */
  #addKeyframe() {
    const index = this.removed + this.events.length;
    if (this.keyframes.length && index - this.keyframes.at(-1).index < this.keyframeEvents) return;
    this.keyframes.push({ index, time: this.state.time, state: this.state.copy() });
    if (this.keyframes.length <= MAX_KEYFRAMES) return;
    this.keyframes = this.keyframes.filter((_, position) => position % 2 === 0);
    this.keyframeEvents *= 2;
  }

  /** Use one string for all occurrences of an id, because JSON creates a new one for each. */
  #shareIds(step) {
    for (const [index, id] of step.request_ids.entries()) {
      const known = this.ids.get(id);
      if (known === undefined) this.ids.set(id, id);
      else step.request_ids[index] = known;
    }
    if (this.ids.size > 20_000) this.ids.clear();
  }

  #addToBucket(step) {
    const time = Math.floor(step.time / BUCKET_SECONDS) * BUCKET_SECONDS;
    let bucket = this.buckets.at(-1);
    if (!bucket || bucket.time !== time) {
      bucket = { time, tokens: 0, ttft: [], gaps: 0, numGaps: 0, running: 0, waiting: 0, held: 0, numWithSlo: 0, numMetSlo: 0 };
      this.buckets.push(bucket);
    }
    step.request_ids.forEach((id, index) => {
      const numNew = step.num_new[index];
      const request = numNew ? this.state.requests.get(id) : undefined;
      bucket.tokens += numNew;
      if (!request) return;
      if (request.firstToken === step.time) bucket.ttft.push(step.time - request.arrival);
      else if (request.previousToken != null) {
        bucket.gaps += step.time - request.previousToken;
        bucket.numGaps += numNew;
      }
    });
    bucket.running = Math.max(bucket.running, step.num_running);
    bucket.waiting = Math.max(bucket.waiting, step.num_waiting);
    const { num_blocks: blocks, block_size: size } = this.state.started;
    const numHeld = step.token_states + step.reserved + step.internal;
    bucket.held = Math.max(bucket.held, blocks ? numHeld / (blocks * size) : 0);
  }

  /** Remove what is older than `seconds`. */
  trim() {
    const first = this.end - this.seconds;
    if (!(this.keyframes.length > 2 && this.keyframes[1].time < first)) return;
    while (this.keyframes.length > 2 && this.keyframes[1].time < first) this.keyframes.shift();
    const count = this.keyframes[0].index - this.removed;
    this.events.splice(0, count);
    this.removed += count;
    this.columns = this.columns.filter((column) => column.end >= first);
    this.buckets = this.buckets.filter((bucket) => bucket.time >= first);
  }

  /**
   * The state at a time. The next call may change it, because a replay continues with the state of the call before.
   *
   * @param {number} time seconds of the engine's clock
   * @returns {EngineState}
   */
  stateAt(time) {
    if (time >= this.end || !this.keyframes.length) return this.state;
    let keyframe = this.keyframes[0];
    for (const candidate of this.keyframes) if (candidate.time <= time) keyframe = candidate;
    const isLater = this.replayed !== null && this.replayed.time <= time && this.replayed.index >= keyframe.index;
    const replayed = isLater ? this.replayed : { index: keyframe.index, state: keyframe.state.copy() };
    for (; replayed.index < this.removed + this.events.length; replayed.index++) {
      const event = this.events[replayed.index - this.removed];
      if ((event.time ?? 0) > time) break;
      replayed.state.apply(event);
    }
    replayed.time = time;
    this.replayed = replayed;
    return replayed.state;
  }

  /** The number of columns up to a time. */
  numColumnsAt(time) {
    return upperBound(this.columns, time, (column) => column.end);
  }

  /** The buckets of the complete seconds up to a time. */
  bucketsUntil(time, seconds) {
    const end = upperBound(this.buckets, time - BUCKET_SECONDS, (bucket) => bucket.time);
    const start = upperBound(this.buckets, time - seconds, (bucket) => bucket.time);
    return this.buckets.slice(start, end);
  }
}

/** The number of entries whose key is at most `limit`, in a list that is sorted by the key. */
function upperBound(list, limit, key) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(list[middle]) <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * The run of an event log in the form of JSON lines.
 *
 * @param {string} text
 * @returns {RunHistory}
 * @throws {Error} with the number of the first line that is not an event
 */
export function runOfLog(text) {
  const run = new RunHistory();
  for (const [index, event] of parseLog(text).entries()) {
    try {
      run.add(event);
    } catch {
      const values = { number: index + 1, type: event.type };
      throw new Error(translate("Event {number} ({type}) does not have the fields of this version's events.", values));
    }
  }
  return run;
}

function parseLog(text) {
  const events = [];
  for (const [index, line] of text.split("\n").entries()) {
    if (!line.trim()) continue;
    let event = null;
    try {
      event = JSON.parse(line);
    } catch {
      // reported below
    }
    if (typeof event?.type !== "string") {
      throw new Error(translate("Line {number} is not an event of an event log.", { number: index + 1 }));
    }
    events.push(event);
  }
  if (events[0]?.type !== "engine_started") {
    throw new Error(translate("The file is not an event log: its first event must be engine_started."));
  }
  return events;
}
