/** The queue, the batch and the selected request as tables and text. */

import { formatCount, formatSeconds, isForeign, plural, shortId } from "./format.js";
import { translate } from "./language.js";
import { queueByReason, requestFacts } from "./request_facts.js";

const MAX_ROWS = 100;

/** Fill the table of the queue: for each reason a heading with the number of its requests, and the requests. */
export function drawQueue(body, state, selected, onSelect) {
  const groups = queueByReason(state);
  const heading = ({ text, longest, entries }) => {
    const values = { text, requests: plural(entries.length, "request"), seconds: formatSeconds(longest) };
    return translate("{text}: {requests}, for up to {seconds}", values);
  };
  const rows = groups.flatMap((group, index) => [
    [`reason-${index}`, heading(group)],
    ...group.entries.filter(([place]) => place <= MAX_ROWS).map(([place, entry]) =>
      [entry.id, [
        String(place),
        idCell(entry),
        formatCount(entry.prompt + entry.output),
        formatSeconds(Math.max(0, state.time - entry.arrival)),
      ]],
    ),
  ]);
  const numWaiting = groups.reduce((sum, { entries }) => sum + entries.length, 0);
  fill(body, rows, selected, onSelect, note(Math.min(numWaiting, MAX_ROWS), numWaiting, translate("No request is waiting.")));
}

/** Fill the table of the batch. */
export function drawBatch(body, state, selected, onSelect) {
  const running = state.running();
  const rows = running.slice(0, MAX_ROWS).map((entry) =>
    [entry.id, [
      String(entry.lane),
      idCell(entry),
      `${formatCount(Math.min(entry.computed, entry.prompt))} / ${formatCount(entry.prompt)}`,
      `${formatCount(entry.output)} / ${formatCount(entry.outputLen ?? entry.maxTokens)}`,
      formatCount(entry.blocks.length),
    ]],
  );
  fill(body, rows, selected, onSelect, note(rows.length, running.length, translate("No request is running.")));
}

function idCell(entry) {
  return isForeign(entry.id) ? translate("another key") : shortId(entry.id);
}

function note(numShown, count, emptyText) {
  if (!count) return emptyText;
  return count > numShown ? translate("and {count} more", { count: formatCount(count - numShown) }) : "";
}

/**
 * Fill a table. The rows of requests that were in it before are kept, so that a click or the focus on one is not lost
 * when the table changes several times a second.
 *
 * @param {HTMLTableSectionElement} body
 * @param {[string, string[]|string][]} rows the id and the cells of each request, of which the second one selects it; or
 *   the key and the text of a heading
 * @param {string|null} selected
 * @param {(id: string) => void} onSelect
 * @param {string} lastText of a row below them; none if it is empty
 */
function fill(body, rows, selected, onSelect, lastText) {
  const known = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  const wanted = rows.map(([id, cells]) => {
    if (typeof cells === "string") {
      const row = known.get(id) ?? headingRow(id);
      setText(row.cells[0], cells);
      return row;
    }
    const row = known.get(id) ?? requestRow(id, cells.length, onSelect);
    row.toggleAttribute("aria-selected", false);
    if (id === selected) row.setAttribute("aria-selected", "true");
    cells.forEach((text, index) => setText(index === 1 ? row.cells[1].firstChild : row.cells[index], text));
    return row;
  });
  if (lastText) wanted.push(noteRow(lastText));
  const kept = new Set(wanted);
  for (const row of [...body.rows]) if (!kept.has(row)) row.remove();
  wanted.forEach((row, index) => {
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  });
}

function requestRow(id, numCells, onSelect) {
  const row = document.createElement("tr");
  row.dataset.id = id;
  for (let index = 0; index < numCells; index++) row.append(document.createElement("td"));
  const button = Object.assign(document.createElement("button"), { type: "button", className: "link", title: id });
  button.addEventListener("click", () => onSelect(id));
  row.cells[1].append(button);
  return row;
}

function headingRow(key) {
  const row = document.createElement("tr");
  row.dataset.id = key;
  row.append(Object.assign(document.createElement("th"), { scope: "rowgroup", colSpan: 4 }));
  return row;
}

function noteRow(text) {
  const row = document.createElement("tr");
  row.append(Object.assign(document.createElement("td"), { textContent: text, colSpan: 4, className: "muted" }));
  return row;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show the facts of the selected request, which is undefined at times when it is not known. */
export function drawSelected(list, entry, state) {
  const facts = entry ? requestFacts(entry, state) : [[translate("State"), translate("not known at the shown time")]];
  facts.forEach(([name, text], index) => {
    if (!list.children[2 * index]) list.append(document.createElement("dt"), document.createElement("dd"));
    setText(list.children[2 * index], name);
    setText(list.children[2 * index + 1], text);
  });
  while (list.children.length > 2 * facts.length) list.lastChild.remove();
}
