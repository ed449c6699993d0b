/** The server's explanation of a request: its sentences in English, and their values in the language of the page. */

import { ApiError, request } from "./api.js";
import { formatSeconds, shortId, waitsByReason } from "./format.js";
import { LANGUAGE, translate } from "./language.js";
import { REASONS, reasonText } from "./request_facts.js";

/** The causes of a missed SLO: the reasons of waits, and others. */
export const CAUSES = {
  ...REASONS,
  own_tokens: "its own tokens take that long, whatever else is scheduled",
  shared_steps: "its steps also computed tokens of other requests (--max-num-batched-tokens, --max-num-seqs)",
  preemption: "it was preempted because KV memory was short (--kv, --scheduling-policy)",
  displacement: "its seat was given to another request (--scheduling-policy, --pacing-tokens-per-second)",
  seats: "other requests held all seats (--max-num-seqs, --scheduling-policy)",
  memory: "other requests held the KV memory (--kv, --scheduling-policy)",
};

/**
 * The waits of a request, and the changes that would have admitted it.
 *
 * @param {string} id
 * @param {object|null} started the event with the engine's configuration, without which the sentences are in English
 * @returns {Promise<string[]>} sentences
 */
export async function explain(id, started) {
  const call = id.replace(/~[^~]*$/, "");
  try {
    const response = await request(`v1/requests/${encodeURIComponent(call)}/explain`);
    const { sequences } = await response.json();
    const sequence = sequences.find((entry) => entry.id === id) ?? sequences[0];
    return sentences(sequence, started);
  } catch (error) {
    if (error instanceof ApiError) return [error.message];
    throw error;
  }
}

/** The sentences of one sequence. */
export function sentences({ position, expected_wait: wait, slo, waits, would_admit: changes, state }, started) {
  const isEnglish = LANGUAGE === "en" || !started;
  const place = { position: position + 1, seconds: formatSeconds(wait) };
  return [
    ...(wait === null ? [] : [translate("Position {position} in the queue, expected to start in {seconds}.", place)]),
    ...(slo ? [translate("SLO: {text}.", { text: isEnglish ? slo.text : sloText(slo, state) })] : []),
    ...waitsByReason(waits, (span) => (isEnglish ? span.text : spanText(span, started))),
    ...changes.map((change) => (isEnglish ? change.text : changeText(change, started))),
  ];
}

function spanText(span, started) {
  const text = reasonText(span, started);
  if (span.head === null || span.is_head) return text;
  return translate("behind {request} at the head of the queue: {text}", { request: shortId(span.head), text });
}

function changeText({ changes, admits }, started) {
  const [[name, value]] = Object.entries(changes);
  const change = `${name}=${value}`;
  if (!admits) return translate("{change} would not have admitted it", { change });
  const isPool = name === "num_kv_blocks" && value === started.num_blocks;
  return translate(isPool ? "{change} without fragmentation would have admitted it" : "{change} would have admitted it", { change });
}

function sloText({ missed, is_met: isMet, cause, cause_seconds: seconds, ...limits }, state) {
  if (missed) {
    const reason = translate(CAUSES[cause] ?? cause);
    const values = { objective: missed.toUpperCase(), limit: limits[`${missed}_ms`], reason, seconds: formatSeconds(seconds) };
    return translate("{objective} exceeds its SLO of {limit} ms, mostly because {reason}: {seconds}", values);
  }
  if (isMet !== null) return translate(isMet ? "its SLO is met" : "it failed, so its SLO is not met");
  return translate(state === "finished" ? "it ended before its first token" : "its SLO can still be met");
}
