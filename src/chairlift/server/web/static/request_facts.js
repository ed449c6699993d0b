/** The facts about one request as text. */

import { formatCount, formatSeconds, plural } from "./format.js";
import { roundingBlocks } from "./memory_map.js";

const REASONS = {
  seats: (event, started) =>
    event.num_running < (started.static_batch_size ?? started.max_num_seqs)
      ? `its beams need more seats than are free (${event.num_running} of ${started.max_num_seqs} are taken)`
      : `all ${started.max_num_seqs} seats are taken (${event.num_running} running)`,
  memory: (event, started, state) => memoryText(event, state),
  token_budget: () => "the rest of the token budget of the step was smaller than its text, which is computed at once",
  pending_token: () => "the tokens of a running request are not known yet",
  sibling_prefill: () => "another answer to the same prompt computes it first",
  preemption: () => "a request was preempted in this step, so nothing is admitted",
  batch: () => "the static batch has not ended",
  fairness: () => "it is the turn of another tenant",
};

function memoryText(event, state) {
  const cached = event.evictable_blocks ? `, ${formatCount(event.evictable_blocks)} of them with cached prefixes` : "";
  const needed = plural(event.needed_blocks, "block");
  const rounding = roundingBlocks(state).size;
  const lost = rounding ? `, ${formatCount(rounding)} are lost to rounding` : "";
  const piece =
    event.largest_free_piece < event.free_blocks
      ? `; the largest free piece has ${formatCount(event.largest_free_piece)}`
      : "";
  return `needs ${needed}, ${formatCount(event.free_blocks)} are free${cached}${lost}${piece}`;
}

function reasonText(event, state) {
  return (REASONS[event.reason] ?? ((e) => e.reason))(event, state.started, state);
}

/** Why a waiting request was not admitted to the last step, with its numbers. */
export function waitText(entry, state) {
  const event = entry.waitingEvent;
  if (event && (entry.id === state.head || event.reason === "sibling_prefill")) return reasonText(event, state);
  return state.head === null ? "it arrived after the last step" : "it is behind the first request of the queue";
}

/** The reason of a waiting request. All requests of a tenant wait for that of the first request of the queue. */
function queueReason(entry, state) {
  const head = state.requests.get(state.head);
  if (entry.waitingEvent?.reason === "sibling_prefill" || !head) return waitText(entry, state);
  if (["fair", "dlpm"].includes(state.started.scheduling_policy) && entry.tenant !== head.tenant) return REASONS.fairness();
  return head.waitingEvent ? reasonText(head.waitingEvent, state) : "the first request of the queue is not admitted";
}

/**
 * The waiting requests by their reason, in the order of the queue.
 *
 * @returns {{text: string, longest: number, entries: [number, object][]}[]} the reason with its numbers, the longest wait in
 *   seconds, and the requests with their places in the queue
 */
export function queueByReason(state) {
  const groups = new Map();
  state.waiting().forEach((entry, index) => {
    const text = queueReason(entry, state);
    if (!groups.has(text)) groups.set(text, { text, longest: 0, entries: [] });
    const group = groups.get(text);
    group.longest = Math.max(group.longest, state.time - entry.arrival);
    group.entries.push([index + 1, entry]);
  });
  return [...groups.values()];
}

/** The facts about one request as pairs of a name and a text. */
export function requestFacts(entry, state) {
  const wait = entry.firstScheduled === null ? null : entry.firstScheduled - entry.arrival;
  const first = entry.firstToken === null ? null : entry.firstToken - entry.arrival;
  const decode = entry.firstToken !== null && entry.lastToken ? entry.lastToken - entry.firstToken : null;
  const perToken = decode !== null && entry.output > 1 ? decode / (entry.output - 1) : null;
  const facts = [
    ["State", entry.finishReason ? `${entry.state} (${entry.finishReason})` : entry.state],
    ["Prompt", `${plural(entry.prompt, "token")}, ${formatCount(entry.cachedTokens)} from the prefix cache`],
    ["Output", `${formatCount(entry.output)} of at most ${plural(entry.outputLen ?? entry.maxTokens, "token")}`],
    ["Queue", formatSeconds(wait ?? (entry.state === "waiting" ? state.time - entry.arrival : null))],
    ["First token", formatSeconds(first)],
    ["Time per output token", formatSeconds(perToken)],
    ["KV memory", plural(entry.blocks.length, "block")],
  ];
  if (entry.preemptions) facts.push(["Preempted", plural(entry.preemptions, "time")]);
  if (entry.state === "waiting") facts.push(["Waits because", waitText(entry, state)]);
  if (entry.message) facts.push(["Rejected", entry.message]);
  return facts;
}
