/** The current figures, and the sentences about batch and memory. */

import { memoryUse, useText } from "./memory_map.js";
import { formatBytes, formatCount, formatPercent, formatSeconds, percentile, plural } from "./format.js";
import { translate } from "./language.js";

const element = (id) => document.getElementById(id);

/** The batch and the queue in a sentence. */
export function batchSentence(state) {
  const values = { requests: plural(state.running().length, "request"), waiting: formatCount(state.waiting().length) };
  return translate("{requests} running, {waiting} waiting.", values);
}

/**
 * Show the figures at the top.
 *
 * @param {import("./run_history.js").RunHistory} run
 * @param {import("./engine_state.js").EngineState} state at the shown time
 * @param {number} time
 */
export function drawFigures(run, state, time) {
  const recent = run.bucketsUntil(time, 10);
  const seconds = recent.length ? Math.max(1, Math.floor(time) - recent[0].time) : 1;
  const tokens = recent.reduce((sum, bucket) => sum + bucket.tokens, 0);
  const minute = run.bucketsUntil(time, 60);
  const ttft = minute.flatMap((bucket) => bucket.ttft);
  const gaps = recent.reduce((sum, bucket) => sum + bucket.gaps, 0);
  const numGaps = recent.reduce((sum, bucket) => sum + bucket.numGaps, 0);
  const use = state.started ? memoryUse(state) : null;
  const numWithSlo = minute.reduce((sum, bucket) => sum + bucket.numWithSlo, 0);
  const numMetSlo = minute.reduce((sum, bucket) => sum + bucket.numMetSlo, 0);
  const minuteSeconds = minute.length ? Math.max(1, Math.floor(time) - minute[0].time) : 1;
  element("figure-goodput").parentElement.hidden = !numWithSlo;
  const figures = {
    tokens: formatCount(tokens / seconds),
    running: `${state.running().length} / ${state.started?.max_num_seqs ?? "–"}`,
    waiting: formatCount(state.waiting().length),
    memory: use?.total ? formatPercent(use.held / use.total) : "–",
    ttft: formatSeconds(percentile(ttft, 0.5)),
    itl: numGaps ? formatSeconds(gaps / numGaps) : "–",
    goodput: numWithSlo ? `${(numMetSlo / minuteSeconds).toFixed(1)} (${formatPercent(numMetSlo / numWithSlo)})` : "–",
  };
  for (const [name, text] of Object.entries(figures)) element(`figure-${name}`).textContent = text;
}

/** Describe the memory map: its blocks, and its slots by kind. */
export function drawMapNote(state) {
  if (!state.started) return;
  const { block_size: size, kv_arena: arena } = state.started;
  const use = memoryUse(state);
  let cached = 0;
  for (let id = 0; id <= state.maxBlock; id++) cached += state.cached[id];
  element("map-note").textContent = translate(
    "{use}; {cached} hold cached prefixes. A block has {slots}, one for the K and V of a token.",
    { use: useText(use), cached: formatCount(cached), slots: plural(size, "slot") },
  );
  drawStatesNote(state);
  const slots = Object.fromEntries(Object.entries(use.slots).map(([kind, count]) => [kind, formatCount(count)]));
  element("slots-note").textContent = translate(
    "Slots: {token_states} token states, {reserved} reserved, {internal} internal and {external} external fragmentation, {free} free.",
    slots,
  );
  element("rounding-note").hidden = arena !== "buddy";
}

/** Describe the recurrent states, if the model has them: those of running requests and the checkpoints of prefixes. */
function drawStatesNote(state) {
  const { state_bytes: bytes, max_num_seqs: seats, num_checkpoints: checkpoints } = state.started;
  element("states").hidden = !bytes;
  if (!bytes) return;
  const running = state.running().length;
  const used = state.step?.num_checkpoints ?? 0;
  const values = {
    running: formatCount(running),
    states: plural(seats, "state"),
    held: formatBytes(running * bytes),
    used: formatCount(used),
    checkpoints: plural(checkpoints, "checkpoint"),
    kept: formatBytes(used * bytes),
    each: formatBytes(bytes),
  };
  element("states-note").textContent = translate(
    "{running} of {states} of requests ({held}) and {used} of {checkpoints} ({kept}) in use; each takes {each}.",
    values,
  );
}
