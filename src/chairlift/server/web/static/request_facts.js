/** The facts about one request as text. */

import { formatCount, formatSeconds, plural } from "./format.js";
import { translate } from "./language.js";
import { roundingBlocks } from "./memory_map.js";

/** The reasons of waits that have no numbers. */
export const REASONS = {
  token_budget: "the rest of the token budget of the step was smaller than its text, which is computed at once",
  pending_token: "the tokens of a running request are not known yet",
  sibling_prefill: "another answer to the same prompt computes it first",
  preemption: "a request was preempted in this step, so nothing is admitted",
  batch: "the static batch has not ended",
  fairness: "it is the turn of another tenant",
  next_step: "the engine was computing a step when it arrived",
  restart: "the engine was restarting",
  unknown: "the events of these steps were lost",
};

function seatsText(event, started) {
  const values = { running: event.num_running, seats: started.max_num_seqs };
  return event.num_running < (started.static_batch_size ?? started.max_num_seqs)
    ? translate("its beams need more seats than are free ({running} of {seats} are taken)", values)
    : translate("all {seats} seats are taken ({running} running)", values);
}

function memoryText(event, numLost) {
  const counted = (text, count, isShown = count > 0) => (isShown ? translate(text, { count: formatCount(count) }) : "");
  const { needed_blocks: needed, free_blocks: free, largest_free_piece: largest } = event;
  const values = { blocks: plural(needed, "block"), free: formatCount(free) };
  return (
    (needed === null ? counted("{count} free", free, true) : translate("needs {blocks}, {free} are free", values)) +
    counted(", {count} of them with cached prefixes", event.evictable_blocks) +
    counted(", {count} are lost to rounding", numLost) +
    counted("; the largest free piece has {count}", largest, largest !== null && largest < free)
  );
}

/** The reason of an event `request_waiting`, or of a span of an explanation, with its numbers. */
export function reasonText(event, started, numLost = 0) {
  if (event.reason === "seats") return seatsText(event, started);
  if (event.reason === "memory") return memoryText(event, numLost);
  return translate(REASONS[event.reason] ?? event.reason);
}

function eventText(event, state) {
  return reasonText(event, state.started, roundingBlocks(state).size);
}

/** Why a waiting request was not admitted to the last step, with its numbers. */
export function waitText(entry, state) {
  const event = entry.waitingEvent;
  if (event && (entry.id === state.head || event.reason === "sibling_prefill")) return eventText(event, state);
  return translate(state.head === null ? "it arrived after the last step" : "it is behind the first request of the queue");
}

/** The reason of a waiting request. All requests of a tenant wait for that of the first request of the queue. */
function queueReason(entry, state) {
  const head = state.requests.get(state.head);
  if (entry.waitingEvent?.reason === "sibling_prefill" || !head) return waitText(entry, state);
  if (["fair", "dlpm"].includes(state.started.scheduling_policy) && entry.tenant !== head.tenant) return translate(REASONS.fairness);
  return head.waitingEvent ? eventText(head.waitingEvent, state) : translate("the first request of the queue is not admitted");
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
  const name = translate(entry.state);
  const prompt = { tokens: plural(entry.prompt, "token"), cached: formatCount(entry.cachedTokens) };
  const output = { count: formatCount(entry.output), tokens: plural(entry.outputLen ?? entry.maxTokens, "token") };
  const facts = [
    ["State", entry.finishReason ? translate("{state} ({reason})", { state: name, reason: entry.finishReason }) : name],
    ["Prompt", translate("{tokens}, {cached} from the prefix cache", prompt)],
    ["Output", translate("{count} of at most {tokens}", output)],
    ["Queue", formatSeconds(wait ?? (entry.state === "waiting" ? state.time - entry.arrival : null))],
    ["First token", formatSeconds(first)],
    ["Time per output token", formatSeconds(perToken)],
    ["KV memory", plural(entry.blocks.length, "block")],
  ];
  if (entry.preemptions) facts.push(["Preempted", plural(entry.preemptions, "time")]);
  if (entry.state === "waiting") facts.push(["Waits because", waitText(entry, state)]);
  if (entry.message) facts.push(["Rejected", entry.message]);
  return facts.map(([name, text]) => [translate(name), text]);
}
