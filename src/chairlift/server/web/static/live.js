/** The live page: connects the stream of events, the player and the views. */

import { ApiError, modelQuery, request } from "./api.js";
import { describeCanvas } from "./canvas.js";
import { drawCharts } from "./charts.js";
import { readForever } from "./event_stream.js";
import { explain } from "./explanation.js";
import { batchSentence, drawFigures, drawMapNote } from "./figures.js";
import { formatCount, formatSeconds, isForeign, plural } from "./format.js";
import { LANGUAGE, LANGUAGES, translate, translatePage } from "./language.js";
import { LanesView } from "./lanes.js";
import { enableBursts } from "./load.js";
import { MemoryMapView, drawStates } from "./memory_map.js";
import { drawBatch, drawQueue, drawSelected } from "./request_views.js";
import { RunHistory, runOfLog } from "./run_history.js";

/** The possible time axes of the charts; the shortest one that holds the run is used. */
const CHART_SECONDS = [15, 30, 60, 120];
const MAX_LOG_BYTES = 512 * 2 ** 20;

const element = (id) => document.getElementById(id);

translatePage();

const page = {
  /** @type {RunHistory} */ live: new RunHistory(),
  /** @type {RunHistory} */ shown: null,
  /** Seconds of the engine's clock; null follows the newest event. */ time: null,
  speed: 0,
  selected: null,
  /** The state of the selected request when it was explained. */ explained: null,
  wanted: new URLSearchParams(location.hash.slice(1)).get("request"),
  connection: "connecting",
  /** Whether the server shows a recorded log in place of an engine. */ isRecorded: false,
  mapBy: "owner",
  mapScope: "used",
  isDirty: true,
};
page.shown = page.live;

const cellStatus = element("cell-status");
const lanes = new LanesView(element("lanes"), cellStatus, select);
const map = new MemoryMapView(element("memory-map"), cellStatus, select);

// -- selection ------------------------------------------------------------------------------------------------------

function select(id) {
  if (id === page.selected) return;
  page.selected = id;
  page.wanted = null;
  history.replaceState(null, "", id === null ? location.pathname + location.search : `#request=${encodeURIComponent(id)}`);
  element("explanation").replaceChildren();
  page.explained = null;
  redraw();
}

async function showExplanation(id) {
  const sentences = await explain(id, page.live.state.started);
  if (page.selected !== id) return;
  if (!sentences.length) sentences.push(translate("It did not wait."));
  const items = sentences.map((text) => Object.assign(document.createElement("li"), { textContent: text }));
  element("explanation").replaceChildren(...items);
}

/** Explain the selected request, and once more when its state changes. */
function updateExplanation() {
  const { selected } = page;
  const canExplain = selected !== null && page.shown === page.live && page.connection === "open" && !isForeign(selected);
  element("explain").disabled = !canExplain;
  const current = page.live.state.requests.get(selected)?.state ?? "unknown";
  if (!canExplain || page.explained === current) return;
  page.explained = current;
  showExplanation(selected);
}

/**
 * Select the request that the URL names as soon as it is known.
 *
 * @param {boolean} isLast whether to select an unknown one, because all of the history was received
 */
function selectWanted(isLast) {
  if (page.wanted === null) return;
  for (const id of page.shown.state.requests.keys()) {
    if (id === page.wanted || id.startsWith(`${page.wanted}~`)) {
      select(id);
      return;
    }
  }
  if (!isLast) return;
  const { wanted } = page;
  select(wanted);
  page.wanted = wanted;
}

// -- time -----------------------------------------------------------------------------------------------------------

function setTime(time, speed = 0) {
  page.time = time;
  page.speed = speed;
  redraw();
}

function shownTime() {
  return page.time ?? page.shown.end;
}

/** Move the shown time forward while a replay runs. */
function advance(milliseconds) {
  if (page.time === null || !page.speed) return;
  page.time += (page.speed * milliseconds) / 1000;
  if (page.time >= page.shown.end) {
    page.speed = 0;
    page.time = page.shown === page.live ? null : page.shown.end;
  }
  page.isDirty = true;
}

element("pause").addEventListener("click", () => {
  if (page.time === null) setTime(page.shown.end);
  else if (page.speed) setTime(page.time);
  else setTime(page.time >= page.shown.end ? page.shown.start : page.time, Number(element("speed").value));
});
element("speed").addEventListener("change", () => {
  if (page.speed) page.speed = Number(element("speed").value);
});
function showStep(offset) {
  const { columns } = page.shown;
  const index = page.shown.numColumnsAt(shownTime()) - 1 + offset;
  if (columns.length) setTime(columns[Math.max(0, Math.min(columns.length - 1, index))].end);
}
element("step-back").addEventListener("click", () => showStep(-1));
element("step-forward").addEventListener("click", () => showStep(1));
element("to-live").addEventListener("click", () => {
  page.shown = page.live;
  showConnection();
  setTime(null);
});
element("scrubber").addEventListener("input", (event) => {
  const { start, end } = page.shown;
  setTime(start + ((end - start) * Number(event.target.value)) / 1000);
});

// -- drawing --------------------------------------------------------------------------------------------------------

function redraw() {
  page.isDirty = true;
}

let lastFrame = performance.now();

function frame(now) {
  advance(now - lastFrame);
  lastFrame = now;
  if (page.isDirty && !document.hidden) {
    page.isDirty = false;
    draw();
  }
  requestAnimationFrame(frame);
}

function draw() {
  const { shown, selected } = page;
  const time = shownTime();
  const state = page.time === null ? shown.state : shown.stateAt(time);
  const numColumns = page.time === null ? shown.columns.length : shown.numColumnsAt(time);
  const isLog = shown !== page.live;
  const numSeats = isLog ? shown.numSeatsUsed : (state.started?.max_num_seqs ?? 1);
  lanes.draw({ columns: shown.columns, numColumns, numSeats, selected, start: isLog ? shown.start : null });
  document.body.dataset.batching = state.started?.batching ?? "continuous";
  map.draw(state, { by: page.mapBy, scope: page.mapScope, selected });
  const seconds = CHART_SECONDS.find((limit) => limit >= shown.end - shown.start) ?? CHART_SECONDS.at(-1);
  drawCharts(shown.bucketsUntil(time, seconds), time, seconds);
  drawQueue(element("queue"), state, selected, select);
  drawBatch(element("batch"), state, selected, select);
  drawFigures(shown, state, time);
  drawMapNote(state);
  if (state.started?.state_bytes) drawStates(element("states-map"), state);
  drawPlayer(time);
  const entry = selected === null ? undefined : state.requests.get(selected);
  element("selected").hidden = selected === null;
  element("nothing-selected").hidden = selected !== null;
  if (selected !== null) element("selected-id").textContent = selected;
  if (selected !== null) drawSelected(element("facts"), entry, state);
  updateExplanation();
  describeCanvas(element("lanes"), translate("Batch lanes. {sentence}", { sentence: batchSentence(state) }));
}

function drawPlayer(time) {
  const { start, end } = page.shown;
  const slider = element("scrubber");
  const isFollowing = page.time === null;
  const position = end > start ? ((time - start) / (end - start)) * 1000 : 1000;
  if (document.activeElement !== slider || isFollowing || page.speed) slider.value = String(position);
  const before = formatSeconds(Math.max(0, end - time));
  const times = { time: formatSeconds(Math.max(0, time - start)), length: formatSeconds(end - start) };
  const fromStart = translate("{time} of {length}", times);
  const isLog = page.shown !== page.live;
  const fromEnd = isFollowing ? translate("newest") : translate("{time} before the end", { time: before });
  slider.setAttribute("aria-valuetext", isLog ? fromStart : fromEnd);
  element("time").textContent = isLog ? fromStart : isFollowing ? translate("now") : `−${before}`;
  const isPlaying = isFollowing || page.speed > 0;
  element("pause").textContent = translate(isPlaying ? "Pause" : "Play");
  element("to-live").hidden = page.isRecorded || (isFollowing && page.shown === page.live);
  showConnection();
  element("to-live").textContent = translate(page.shown === page.live ? "Go to now" : "Back to the engine");
}

// -- source of events -----------------------------------------------------------------------------------------------

function setStatus(kind, text) {
  const pill = element("status");
  pill.dataset.kind = kind;
  if (pill.textContent === text) return;
  pill.textContent = text;
}

function showConnection() {
  if (page.shown !== page.live) return;
  const open = page.time === null ? "Live" : page.speed ? "Replay" : "Paused";
  const kind = page.connection === "open" && page.time !== null ? "paused" : page.connection;
  setStatus(kind, translate({ connecting: "Connecting", open, lost: "Disconnected" }[page.connection]));
  element("model").textContent = page.live.state.started?.model ?? "";
}

function receive(kind, data) {
  if (kind === "dropped") {
    element("notice").textContent = translate("The page was too slow and missed {events}.", { events: plural(data.num_events, "event") });
    return;
  }
  if (kind === "history" && page.live.events.length && !receive.inHistory) restartLive();
  receive.inHistory = kind === "history";
  const started = data.events.find((event) => event.type === "engine_started");
  if (started && page.live.state.started && page.live.state.started.time !== started.time) restartLive();
  for (const event of data.events) page.live.add(event);
  page.live.trim();
  if (data.time) page.live.state.time = Math.max(page.live.state.time, data.time);
  if (page.shown === page.live) element("model").textContent = page.live.state.started?.model ?? "";
  selectWanted(kind === "frame");
  redraw();
}
receive.inHistory = false;

/** Forget what was received before a lost connection, because the history has it as well, or of another engine. */
function restartLive() {
  const isShown = page.shown === page.live;
  page.live = new RunHistory(page.live.seconds);
  if (isShown) page.shown = page.live;
  page.explained = null;
}

async function openLog(name, source) {
  element("notice").textContent = translate("Reading {name} …", { name });
  try {
    const run = runOfLog(await source.text());
    page.shown = run;
    select(null);
    setTime(run.firstQueue ?? run.end);
    setStatus("log", translate("Log: {name}", { name }));
    element("model").textContent = run.state.started.model;
    const facts = { name, steps: plural(run.columns.length, "step"), length: formatSeconds(run.end - run.start) };
    element("notice").textContent = translate("{name}: {steps}, {length}.", facts);
  } catch (error) {
    element("notice").textContent = translate("{name}: {message}", { name, message: error.message });
  }
}

async function openFile(file) {
  if (!file) return;
  if (file.size > MAX_LOG_BYTES) {
    const values = { name: file.name, size: formatCount(file.size / 2 ** 20) };
    element("notice").textContent = translate("{name} has {size} MiB; at most 512 MiB can be opened.", values);
    return;
  }
  await openLog(file.name, file);
}

element("open-log").addEventListener("click", () => element("log-file").click());
element("log-file").addEventListener("change", (event) => {
  openFile(event.target.files[0]);
  event.target.value = "";
});
addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.dataset.dragging = "true";
});
addEventListener("dragleave", (event) => {
  if (event.relatedTarget === null) delete document.body.dataset.dragging;
});
addEventListener("drop", (event) => {
  event.preventDefault();
  delete document.body.dataset.dragging;
  openFile(event.dataTransfer.files[0]);
});

// -- controls -------------------------------------------------------------------------------------------------------

for (const [name, key] of [["map-by", "mapBy"], ["map-scope", "mapScope"]]) {
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) {
    input.addEventListener("change", () => {
      page[key] = input.value;
      document.body.dataset[key] = input.value;
      redraw();
    });
  }
}
document.body.dataset.mapBy = page.mapBy;
element("explain").addEventListener("click", () => showExplanation(page.selected));
element("clear-selection").addEventListener("click", () => select(null));
addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea, button, canvas") || event.target.closest("dialog");
  if (event.key === "Escape") select(null);
  if (isTyping) return;
  const button = { " ": "pause", ",": "step-back", ".": "step-forward" }[event.key];
  if (!button || event.ctrlKey || event.metaKey || event.altKey) return;
  element(button).click();
  event.preventDefault();
});
addEventListener("hashchange", () => {
  page.wanted = new URLSearchParams(location.hash.slice(1)).get("request");
  selectWanted(true);
});
addEventListener("resize", redraw);
addEventListener("themechange", redraw);
document.addEventListener("visibilitychange", redraw);

/**
 * Let the user choose one of several models or replicas; the page shows the one of its address.
 *
 * @param {string} parameter the parameter of the address, "model" or "replica"
 * @param {string[]} names
 * @param {string[]} kept the other parameters of the address that a choice keeps
 */
function showChoice(parameter, names, kept) {
  const select = element(`choose-${parameter}`);
  const given = new URLSearchParams(location.search);
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  select.value = given.get(parameter) ?? names[0];
  select.parentElement.hidden = names.length < 2;
  select.addEventListener("change", () => {
    const others = kept.filter((name) => given.has(name)).map((name) => [name, given.get(name)]);
    location.assign(`./?${new URLSearchParams([...others, [parameter, select.value]])}`);
  });
}

/** Link to the page in the other language. */
function linkToLanguage() {
  const link = element("language");
  if (!link) return;
  link.lang = link.hreflang = Object.keys(LANGUAGES).find((name) => name !== LANGUAGE);
  link.textContent = LANGUAGES[link.lang];
  const given = new URLSearchParams(location.search);
  given.set("lang", link.lang);
  link.href = `?${given}`;
}

async function main() {
  linkToLanguage();
  requestAnimationFrame(frame);
  let view = null;
  while (view === null) {
    try {
      view = await (await request(`v1/page${modelQuery()}`)).json();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setStatus("lost", error.message);
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
  page.live.seconds = view.history_seconds || Infinity;
  enableBursts(view, () => select(null));
  element("version").textContent = `Chairlift ${view.version}`;
  element("viewer").textContent = view.is_admin ? "" : translate("Key {key}: requests of other keys are shown without their ids.", { key: view.key });
  if (view.recorded_log) {
    page.isRecorded = true;
    await openLog(view.recorded_log, await request("v1/page/log"));
    selectWanted(true);
    return;
  }
  showChoice("model", view.models, ["lang"]);
  element("model").hidden = view.models.length > 1;
  showChoice("replica", view.replicas, ["lang", "model"]);
  let problem = "";
  readForever(`v1/page/events${modelQuery()}`, {
    message: receive,
    state: (state, detail) => {
      page.connection = state;
      showConnection();
      if (detail) element("notice").textContent = problem = detail;
      else if (state === "open" && element("notice").textContent === problem) element("notice").textContent = "";
    },
  });
}

main();
