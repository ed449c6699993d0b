/** The live page: connects the stream of events, the player and the views. */

import { ApiError, request } from "./api.js";
import { drawCharts } from "./charts.js";
import { readForever } from "./event_stream.js";
import { formatCount, formatPercent, formatSeconds, percentile, plural, shortId } from "./format.js";
import { LanesView } from "./lanes.js";
import { LoadPanel } from "./load.js";
import { MemoryMapView } from "./memory_map.js";
import { drawBatch, drawQueue, drawSelected, explain } from "./request_views.js";
import { parseLog, RunHistory } from "./run_history.js";

const CHART_SECONDS = 120;
const MAX_LOG_BYTES = 512 * 2 ** 20;
const STATUS_MILLISECONDS = 4000;

const element = (id) => document.getElementById(id);

const page = {
  /** @type {RunHistory} */ live: new RunHistory(),
  /** @type {RunHistory} */ shown: null,
  /** Seconds of the engine's clock; null follows the newest event. */ time: null,
  speed: 0,
  selected: null,
  wanted: new URLSearchParams(location.hash.slice(1)).get("request"),
  connection: "connecting",
  mapBy: "owner",
  mapScope: "used",
  isDirty: true,
};
page.shown = page.live;

const laneStatus = element("lane-status");
const lanes = new LanesView(element("lanes"), laneStatus, select);
const map = new MemoryMapView(element("memory-map"), select);
let load = null;

// -- selection ------------------------------------------------------------------------------------------------------

function select(id) {
  if (id === page.selected) return;
  page.selected = id;
  page.wanted = null;
  history.replaceState(null, "", id === null ? location.pathname : `#request=${encodeURIComponent(id)}`);
  element("explanation").replaceChildren();
  element("explain").disabled = id === null || !isLive() || id.startsWith("other-");
  if (id !== null && !element("explain").disabled) showExplanation(id);
  redraw();
}

async function showExplanation(id) {
  const sentences = await explain(id);
  if (page.selected !== id) return;
  const items = sentences.map((text) => Object.assign(document.createElement("li"), { textContent: text }));
  if (!items.length) items.push(Object.assign(document.createElement("li"), { textContent: "It did not wait." }));
  element("explanation").replaceChildren(...items);
}

/** Select the request that the URL names as soon as it is known. */
function selectWanted() {
  if (page.wanted === null) return;
  for (const id of page.shown.state.requests.keys()) {
    if (id === page.wanted || id.startsWith(`${page.wanted}~`)) {
      select(id);
      return;
    }
  }
}

// -- time -----------------------------------------------------------------------------------------------------------

function isLive() {
  return page.shown === page.live && page.time === null;
}

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
let lastStatus = 0;

function frame(now) {
  advance(now - lastFrame);
  lastFrame = now;
  if (page.isDirty && !document.hidden) {
    page.isDirty = false;
    draw(now);
  }
  requestAnimationFrame(frame);
}

function draw(now) {
  const { shown, selected } = page;
  const time = shownTime();
  const state = page.time === null ? shown.state : shown.stateAt(time);
  const numColumns = page.time === null ? shown.columns.length : shown.numColumnsAt(time);
  const numSeats = state.started?.max_num_seqs ?? 1;
  lanes.draw({ columns: shown.columns, numColumns, numSeats, selected });
  const numHeld = map.draw(state, { by: page.mapBy, scope: page.mapScope, selected });
  drawCharts(shown.bucketsUntil(time, CHART_SECONDS), time, CHART_SECONDS);
  drawQueue(element("queue"), state, selected, select);
  drawBatch(element("batch"), state, selected, select);
  drawFigures(state, time, numHeld);
  drawMapNote(state, numHeld);
  drawPlayer(time);
  const entry = selected === null ? undefined : state.requests.get(selected);
  element("selected").hidden = selected === null;
  element("nothing-selected").hidden = selected !== null;
  if (selected !== null) element("selected-id").textContent = selected;
  if (entry) drawSelected(element("facts"), entry, state);
  load?.update(selected);
  if (now - lastStatus > STATUS_MILLISECONDS) {
    lastStatus = now;
    element("lanes").setAttribute("aria-label", `Batch lanes. ${batchSentence(state)}`);
  }
}

function batchSentence(state) {
  const running = state.running().length;
  const waiting = state.waiting().length;
  return `${plural(running, "request")} running, ${formatCount(waiting)} waiting.`;
}

function drawFigures(state, time, numHeld) {
  const recent = page.shown.bucketsUntil(time, 10);
  const seconds = recent.length ? Math.max(1, time - recent[0].time) : 1;
  const isIdle = !state.running().length;
  const tokens = recent.reduce((sum, bucket) => sum + bucket.tokens, 0);
  const ttft = page.shown.bucketsUntil(time, 60).flatMap((bucket) => bucket.ttft);
  const gaps = recent.reduce((sum, bucket) => sum + bucket.gaps, 0);
  const numGaps = recent.reduce((sum, bucket) => sum + bucket.numGaps, 0);
  const total = state.started?.num_blocks ?? 0;
  const figures = {
    tokens: isIdle && !recent.length ? "0" : formatCount(tokens / seconds),
    running: `${state.running().length} / ${state.started?.max_num_seqs ?? "–"}`,
    waiting: formatCount(state.waiting().length),
    memory: total ? formatPercent(numHeld / total) : "–",
    ttft: formatSeconds(percentile(ttft, 0.5)),
    itl: numGaps ? formatSeconds(gaps / numGaps) : "–",
  };
  for (const [name, text] of Object.entries(figures)) element(`figure-${name}`).textContent = text;
}

function drawMapNote(state, numHeld) {
  if (!state.started) return;
  const { num_blocks: total, block_size: size } = state.started;
  let cached = 0;
  for (let id = 0; id <= state.maxBlock; id++) cached += state.cached[id];
  const share = formatPercent(numHeld / total);
  element("map-note").textContent =
    `${plural(numHeld, "block")} of ${formatCount(total)} in use (${share}), ${formatCount(cached)} hold cached ` +
    `prefixes; a block has ${plural(size, "slot")}, one for the K and V of a token.`;
  const step = state.running().length ? state.step : null;
  element("slots-note").textContent = step
    ? `Slots: ${formatCount(step.token_states)} token states, ${formatCount(step.reserved)} reserved, ` +
      `${formatCount(step.internal)} internal and ${formatCount(step.external)} external fragmentation, ` +
      `${formatCount(step.free)} free.`
    : `Slots: ${formatCount(total * size)} free.`;
}

function drawPlayer(time) {
  const { start, end } = page.shown;
  const slider = element("scrubber");
  const isFollowing = page.time === null;
  const position = end > start ? ((time - start) / (end - start)) * 1000 : 1000;
  if (document.activeElement !== slider || isFollowing || page.speed) slider.value = String(position);
  const text = isFollowing ? "newest" : `${formatSeconds(Math.max(0, end - time))} before the end`;
  slider.setAttribute("aria-valuetext", text);
  element("time").textContent = isFollowing ? "now" : `−${formatSeconds(Math.max(0, end - time))}`;
  const isPlaying = isFollowing || page.speed > 0;
  element("pause").textContent = isPlaying ? "Pause" : "Play";
  element("to-live").hidden = isFollowing && page.shown === page.live;
  element("to-live").textContent = page.shown === page.live ? "Go to now" : "Back to the engine";
}

// -- source of events -----------------------------------------------------------------------------------------------

function setStatus(kind, text) {
  const pill = element("status");
  pill.dataset.kind = kind;
  pill.textContent = text;
}

function showConnection() {
  if (page.shown !== page.live) return;
  setStatus(page.connection, { connecting: "Connecting", open: "Live", lost: "Disconnected" }[page.connection]);
  element("model").textContent = page.live.state.started?.model ?? "";
}

function receive(kind, data) {
  if (kind === "dropped") {
    element("notice").textContent = `The page was too slow and missed ${plural(data.num_events, "event")}.`;
    return;
  }
  if (kind === "history" && page.live.events.length && !receive.inHistory) restartLive();
  receive.inHistory = kind === "history";
  for (const event of data.events) page.live.add(event);
  page.live.trim();
  if (data.time) page.live.state.time = Math.max(page.live.state.time, data.time);
  if (page.shown === page.live) element("model").textContent = page.live.state.started?.model ?? "";
  selectWanted();
  redraw();
}
receive.inHistory = false;

/** Forget what was received before a lost connection, because the history has it as well. */
function restartLive() {
  const isShown = page.shown === page.live;
  page.live = new RunHistory(page.live.seconds);
  if (isShown) page.shown = page.live;
  if (load) load.history = page.live;
}

async function openLog(name, text) {
  try {
    const run = new RunHistory();
    for (const event of parseLog(text)) run.add(event);
    page.shown = run;
    select(null);
    setTime(run.end);
    setStatus("log", `Log: ${name}`);
    element("model").textContent = run.state.started.model;
    element("notice").textContent = `${name}: ${plural(run.columns.length, "step")}, ${formatSeconds(run.end - run.start)}.`;
  } catch (error) {
    element("notice").textContent = `${name}: ${error.message}`;
  }
}

async function openFile(file) {
  if (!file) return;
  if (file.size > MAX_LOG_BYTES) {
    element("notice").textContent = `${file.name} has ${formatCount(file.size / 2 ** 20)} MiB; at most 512 MiB can be opened.`;
    return;
  }
  await openLog(file.name, await file.text());
}

element("open-log").addEventListener("click", () => element("log-file").click());
element("log-file").addEventListener("change", (event) => {
  openFile(event.target.files[0]);
  event.target.value = "";
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
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
  if (event.key === " ") {
    element("pause").click();
    event.preventDefault();
  }
});
addEventListener("hashchange", () => {
  page.wanted = new URLSearchParams(location.hash.slice(1)).get("request");
  selectWanted();
});
addEventListener("resize", redraw);
addEventListener("themechange", redraw);
document.addEventListener("visibilitychange", redraw);

async function main() {
  requestAnimationFrame(frame);
  let view = null;
  while (view === null) {
    try {
      view = await (await request("/v1/page")).json();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setStatus("lost", error.message);
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
  page.live.seconds = view.history_seconds || Infinity;
  load = new LoadPanel(view, page.live, select);
  element("version").textContent = `Chairlift ${view.version}`;
  element("viewer").textContent = view.is_admin ? "" : `Key ${view.key}: requests of other keys are shown without their ids.`;
  if (view.recorded_log) {
    document.body.dataset.recorded = "true";
    await openLog(view.recorded_log, await (await request("/v1/page/log")).text());
    return;
  }
  readForever("/v1/page/events", {
    message: receive,
    state: (state, detail) => {
      page.connection = state;
      showConnection();
      if (detail) element("notice").textContent = detail;
      else if (state === "open") element("notice").textContent = "";
    },
  });
}

main();
