/** Sends a burst of synthetic requests, and compares its run with a simulation under another policy. */

import { ApiError, modelQuery, post, postAndFollow } from "./api.js";
import { LanesView } from "./lanes.js";
import { RunHistory } from "./run_history.js";
import { formatCount, formatSeconds, percentile, plural } from "./format.js";

/** Each running burst has a connection, and browsers open six to a server. */
const MAX_BURSTS = 3;

/** The parts of the page for bursts and for the comparison. */
export class LoadPanel {
  /**
   * @param {object} view the answer of /v1/page
   * @param {RunHistory} history
   * @param {(id: string|null) => void} onSelect
   */
  constructor(view, history, onSelect) {
    this.history = history;
    this.onSelect = onSelect;
    this.burst = null;
    this.numRunning = 0;
    this.simulated = null;
    this.isSimulating = false;
    /** Events that the page was too slow to receive. */ this.numDropped = 0;
    this.form = document.getElementById("burst-form");
    this.status = document.getElementById("burst-status");
    this.toggle = document.getElementById("compare-toggle");
    this.policy = document.getElementById("compare-policy");
    this.policy.append(...view.simulation.policies.map((name) => new Option(policyTitle(name), name)));
    this.panel = document.getElementById("compare");
    const note = document.getElementById("burst-note");
    this.form.querySelector("fieldset").disabled = !view.control;
    note.textContent = view.control ? "" : controlNote(view);
    this.toggle.disabled = !view.simulation.available || !view.control;
    document.getElementById("compare-note").textContent = view.simulation.message ?? "";
    const status = document.getElementById("cell-status");
    this.real = new LanesView(document.getElementById("compare-real"), status, onSelect);
    this.other = new LanesView(document.getElementById("compare-simulated"), status, onSelect);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.toggle.addEventListener("change", () => this.update());
    this.policy.addEventListener("change", () => {
      this.simulated = null;
      this.update();
    });
  }

  async #send() {
    const body = {};
    for (const input of this.form.querySelectorAll("input")) body[input.name] = Number(input.value);
    const { seed } = this.form.elements;
    if (this.numRunning === MAX_BURSTS) {
      this.status.textContent = `${MAX_BURSTS} bursts are running: wait until one has ended.`;
      return;
    }
    this.status.textContent = "Sending …";
    try {
      const { requests } = await postAndFollow(`v1/page/burst${modelQuery()}`, body, () => (this.numRunning -= 1));
      this.numRunning += 1;
      this.burst = { ids: new Set(requests.map((entry) => entry.id)), requests, entries: new Map() };
      this.simulated = null;
      this.status.textContent = `${plural(requests.length, "request")} sent.`;
      // Other prompts next time: the prefix cache would have the same ones already, and the simulation would not.
      seed.value = String(body.seed + 1);
      this.onSelect(null);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.status.textContent = error.message;
    }
  }

  /** Redraw the comparison, and simulate the selected policy once the burst has ended. */
  update(selected = null) {
    const isShown = this.toggle.checked && this.burst !== null;
    this.panel.hidden = !isShown;
    if (!isShown) return;
    const own = this.#ownRequests();
    const numEnded = own.filter((entry) => entry.end !== null).length;
    const numSeen = this.#hasMissedEvents() ? own.length : this.burst.requests.length;
    const isComplete = own.length > 0 && numEnded === numSeen;
    if (isComplete && !this.simulated && !this.isSimulating) this.#simulate(own);
    this.#draw(own, isComplete, numEnded, selected);
  }

  /** The requests of the burst, also those that the state has forgotten since. */
  #ownRequests() {
    const callId = (id) => id.replace(/~[^~]*$/, "");
    for (const entry of this.history.state.requests.values()) {
      if (this.burst.ids.has(callId(entry.id))) this.burst.entries.set(entry.id, entry);
    }
    return [...this.burst.entries.values()];
  }

  /** Whether the burst has ended although not all of its requests are known, because the page was too slow. */
  #hasMissedEvents() {
    const { state } = this.history;
    return this.numDropped > 0 && !state.running().length && !state.waiting().length;
  }

  #missedText(own) {
    const { length } = this.burst.requests;
    return own.length === length ? "" : ` (${formatCount(own.length)} of ${plural(length, "request")} were received)`;
  }

  async #simulate(own) {
    this.isSimulating = true;
    const policy = this.policy.value;
    const requests = own.map((entry) => ({
      request_id: entry.id,
      arrival_time: entry.arrival,
      num_prompt_tokens: entry.prompt,
      num_output_tokens: Math.max(1, entry.output),
    }));
    try {
      const { events } = await post(`v1/page/simulation${modelQuery()}`, { policy, requests });
      const run = new RunHistory();
      for (const event of events) run.add(event);
      if (policy === this.policy.value) this.simulated = run;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.status.textContent = error.message;
      this.toggle.checked = false;
    }
    this.isSimulating = false;
    this.update();
  }

  #draw(own, isComplete, numEnded, selected) {
    if (!own.length) return;
    const start = Math.min(...own.map((entry) => entry.arrival));
    const ends = own.map((entry) => entry.end ?? this.history.end);
    const simulated = this.simulated ? [...this.simulated.state.requests.values()] : [];
    const span = [start, Math.max(...ends, ...simulated.map((entry) => entry.end ?? start), start + 0.1)];
    const numSeats = this.history.state.started.max_num_seqs;
    const { batching, scheduling_policy: order } = this.history.state.started;
    document.getElementById("compare-real-name").textContent = policyTitle(batching === "static" ? batching : order);
    document.getElementById("compare-simulated-name").textContent = policyTitle(this.policy.value);
    const draw = (view, run) =>
      view.draw({ columns: run.columns, numColumns: run.columns.length, numSeats, selected, span });
    draw(this.real, this.history);
    document.getElementById("compare-real-text").textContent = isComplete
      ? `${summary(own, start)}${this.#missedText(own)}`
      : `${numEnded} of ${plural(this.burst.requests.length, "request")} finished`;
    const numCached = own.reduce((sum, entry) => sum + entry.cachedTokens, 0);
    document.getElementById("compare-cached").textContent = numCached
      ? `${formatCount(numCached)} prompt tokens came from the prefix cache, which the simulation does not have.`
      : "";
    const text = document.getElementById("compare-simulated-text");
    document.getElementById("compare-simulated").parentElement.hidden = this.simulated === null;
    if (this.simulated) {
      draw(this.other, this.simulated);
      text.textContent = summary(simulated, start);
    } else {
      text.textContent = "simulated when the burst has finished";
    }
  }
}

/** The name of a policy on the page: static batches, or an order of the queue under continuous batching. */
function policyTitle(policy) {
  return policy === "static" ? "Static batching" : `Continuous batching, ${policy}`;
}

function controlNote(view) {
  if (view.recorded_log) return "A recorded log cannot be loaded with requests.";
  return "Bursts are off, because the server has API keys or is reachable from other machines. Start it with --page-control to send them.";
}

function summary(requests, start) {
  const finished = requests.filter((entry) => entry.end !== null && entry.state === "finished");
  if (!finished.length) return "no request finished";
  const latencies = finished.map((entry) => entry.end - entry.arrival);
  const mean = latencies.reduce((sum, value) => sum + value, 0) / latencies.length;
  const total = Math.max(...finished.map((entry) => entry.end)) - start;
  const parts = [
    `total ${formatSeconds(total)}`,
    `mean latency ${formatSeconds(mean)}`,
    `median ${formatSeconds(percentile(latencies, 0.5))}`,
  ];
  return parts.join(", ");
}
