/** The queue, the batch and the selected request as tables and text. */

import { ApiError, request } from "./api.js";
import { formatCount, formatSeconds, isForeign, plural, shortId } from "./format.js";

const MAX_ROWS = 100;

const REASONS = {
  seats: (event, started) => `all ${started.max_num_seqs} seats are taken (${event.num_running} running)`,
  memory: (event) => memoryText(event),
  pending_token: () => "the tokens of a running request are not known yet",
  sibling_prefill: () => "another answer to the same prompt computes it first",
  preemption: () => "a request was preempted in this step, so nothing is admitted",
  batch: () => "the static batch has not ended",
  fairness: () => "it is the turn of another tenant",
};

function memoryText(event) {
  const cached = event.evictable_blocks ? `, ${formatCount(event.evictable_blocks)} of them with cached prefixes` : "";
  const needed = plural(event.needed_blocks, "block");
  const piece =
    event.largest_free_piece < event.free_blocks
      ? `; the largest free piece has ${formatCount(event.largest_free_piece)}`
      : "";
  return `needs ${needed}, ${formatCount(event.free_blocks)} are free${cached}${piece}`;
}

/** Why a waiting request was not admitted to the last step, with its numbers. */
export function waitText(entry, state) {
  const event = entry.waitingEvent;
  if (event) return (REASONS[event.reason] ?? ((e) => e.reason))(event, state.started);
  return state.head === null ? "it arrived after the last step" : "it is behind the first request of the queue";
}

/** Fill the table of the queue. */
export function drawQueue(body, state, selected, onSelect) {
  const waiting = state.waiting();
  const rows = waiting.slice(0, MAX_ROWS).map((entry, index) =>
    row(entry, selected, onSelect, [
      String(index + 1),
      idCell(entry),
      formatCount(entry.prompt + entry.output),
      formatSeconds(Math.max(0, state.time - entry.arrival)),
      waitText(entry, state),
    ]),
  );
  fill(body, rows, 5, "No request is waiting.", waiting.length);
}

/** Fill the table of the batch. */
export function drawBatch(body, state, selected, onSelect) {
  const running = state.running();
  const rows = running.slice(0, MAX_ROWS).map((entry) =>
    row(entry, selected, onSelect, [
      String(entry.lane),
      idCell(entry),
      `${formatCount(Math.min(entry.computed, entry.prompt))} / ${formatCount(entry.prompt)}`,
      `${formatCount(entry.output)} / ${formatCount(entry.outputLen ?? entry.maxTokens)}`,
      formatCount(entry.blocks.length),
    ]),
  );
  fill(body, rows, 5, "No request is running.", running.length);
}

function idCell(entry) {
  return isForeign(entry.id) ? "another key" : shortId(entry.id);
}

function row(entry, selected, onSelect, cells) {
  const element = document.createElement("tr");
  if (entry.id === selected) element.setAttribute("aria-selected", "true");
  cells.forEach((text, index) => {
    const cell = document.createElement("td");
    if (index === 1) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
      button.className = "link";
      button.title = entry.id;
      button.addEventListener("click", () => onSelect(entry.id));
      cell.append(button);
    } else {
      cell.textContent = text;
    }
    element.append(cell);
  });
  return element;
}

function fill(body, rows, numColumns, emptyText, count) {
  const focused = document.activeElement?.closest("tbody") === body ? document.activeElement.title : null;
  if (!rows.length) rows = [note(emptyText, numColumns)];
  if (count > MAX_ROWS) rows.push(note(`and ${formatCount(count - MAX_ROWS)} more`, numColumns));
  body.replaceChildren(...rows);
  if (focused) [...body.querySelectorAll("button")].find((button) => button.title === focused)?.focus();
}

function note(text, numColumns) {
  const element = document.createElement("tr");
  const cell = Object.assign(document.createElement("td"), { textContent: text, colSpan: numColumns });
  cell.className = "muted";
  element.append(cell);
  return element;
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

/** Show the facts of the selected request. */
export function drawSelected(list, entry, state) {
  const parts = requestFacts(entry, state).flatMap(([name, text]) => [
    Object.assign(document.createElement("dt"), { textContent: name }),
    Object.assign(document.createElement("dd"), { textContent: text }),
  ]);
  list.replaceChildren(...parts);
}

/**
 * The server's explanation of a request: its waits, and the changes that would have admitted it.
 *
 * @param {string} id
 * @returns {Promise<string[]>} sentences
 */
export async function explain(id) {
  const call = id.replace(/~[^~]*$/, "");
  try {
    const response = await request(`/v1/requests/${encodeURIComponent(call)}/explain`);
    const { sequences } = await response.json();
    const sequence = sequences.find((entry) => entry.id === id) ?? sequences[0];
    const waits = sequence.waits.flatMap((wait) => wait.spans.map((span) => span.text));
    const expected =
      sequence.expected_wait === null
        ? []
        : [`Position ${sequence.position + 1} in the queue, expected to start in ${formatSeconds(sequence.expected_wait)}.`];
    return [...expected, ...waits, ...sequence.would_admit.map((change) => change.text)];
  } catch (error) {
    if (error instanceof ApiError) return [error.message];
    throw error;
  }
}
