/** What the chapters have in common: elements, a replay of events, the controls of a picture, and facts about a request. */

import { EngineState } from "./engine_state.js";
import { translate } from "./language.js";
import { requestFacts } from "./request_facts.js";

const PLAY_SECONDS = 16;
const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Create an element with properties and children. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** The place of a chapter's picture. */
export function stageOf(chapter) {
  return document.querySelector(`#${chapter} .stage`);
}

/** The states of a run after each step. */
export class Replay {
  /** @param {object[]} events */
  constructor(events) {
    this.events = events;
    const state = new EngineState();
    this.columns = events.map((event) => state.apply(event)).filter(Boolean);
    this.numSeats = 1 + Math.max(...this.columns.flatMap((column) => column.ids.map((id, seat) => (id === null ? 0 : seat))));
    this.#restart();
  }

  #restart() {
    this.state = new EngineState();
    this.next = 0;
    this.count = 0;
  }

  /** The state after a number of steps; the next call changes it. */
  after(numSteps) {
    if (numSteps < this.count) this.#restart();
    while (this.count < numSteps) if (this.state.apply(this.events[this.next++])) this.count++;
    return this.state;
  }
}

/** The number of a request, which counts them in the order of their arrival. */
export function numberOf(entry) {
  return String(entry.order + 1);
}

/** The controls of a picture: play, step back, step forward, and a slider over the steps. */
export class Player {
  /**
   * @param {HTMLElement} stage
   * @param {number} numSteps
   * @param {(step: number) => void} onStep
   */
  constructor(stage, numSteps, onStep) {
    Object.assign(this, { onStep, step: 1, frame: null });
    this.play = make("button", { type: "button", className: "primary", textContent: translate("Play"), hidden: isStill });
    this.back = make("button", { type: "button", textContent: "‹" });
    this.forward = make("button", { type: "button", textContent: "›" });
    this.back.setAttribute("aria-label", translate("Previous step"));
    this.forward.setAttribute("aria-label", translate("Next step"));
    this.slider = make("input", { type: "range", min: "1", step: "1" });
    this.slider.setAttribute("aria-label", translate("Step"));
    this.label = make("span", { className: "number" });
    const wide = make("span", { className: "wide" }, this.slider);
    stage.append(make("div", { className: "player" }, this.play, this.back, this.forward, wide, this.label));
    this.play.addEventListener("click", () => (this.frame === null ? this.#start() : this.pause()));
    this.back.addEventListener("click", () => this.pause(this.step - 1));
    this.forward.addEventListener("click", () => this.pause(this.step + 1));
    this.slider.addEventListener("input", () => this.pause(Number(this.slider.value)));
    this.setLength(numSteps);
  }

  setLength(numSteps) {
    this.numSteps = numSteps;
    this.slider.max = String(numSteps);
  }

  /** Stop playing, and show a step. */
  pause(step = this.step) {
    this.#stop();
    this.show(step);
  }

  #stop() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.play.textContent = translate("Play");
  }

  /** Show a step, from 1 on. */
  show(step) {
    this.step = Math.max(1, Math.min(this.numSteps, step));
    this.slider.value = String(this.step);
    this.label.textContent = translate("step {step} of {count}", { step: this.step, count: this.numSteps });
    this.onStep(this.step);
  }

  #start() {
    const first = this.step === this.numSteps ? 1 : this.step;
    this.play.textContent = translate("Pause");
    let start = null;
    const advance = (time) => {
      start ??= time;
      const step = first + Math.floor(((time - start) / 1000 / PLAY_SECONDS) * this.numSteps);
      if (step !== this.step) this.show(step);
      if (step >= this.numSteps) this.#stop();
      else this.frame = requestAnimationFrame(advance);
    };
    this.frame = requestAnimationFrame(advance);
  }
}

/** The box below a picture with the facts about what was selected. */
export class Facts {
  constructor(stage, hint) {
    this.hint = hint;
    this.box = make("div", { className: "facts" });
    this.box.setAttribute("role", "status");
    stage.append(this.box);
  }

  /** @param {object|undefined} entry a request of the state @param {string} [reason] the first sentence */
  show(entry, state, reason = "") {
    if (!entry) {
      this.box.replaceChildren(make("p", { className: "muted", textContent: reason || translate(this.hint) }));
      return;
    }
    const pairs = requestFacts(entry, state).filter(([name]) => name !== translate("Time per output token"));
    const list = pairs.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })]);
    this.box.replaceChildren(
      make("h3", { textContent: translate("Request {number}", { number: numberOf(entry) }) }),
      make("p", { textContent: reason }),
      make("dl", {}, ...list),
    );
  }
}

/** A list of the colours of a picture; each entry is a class, a label, and the letter of the class if it has one. */
export function legend(stage, entries) {
  const textOf = (label, letter) => (letter ? translate("{letter}: {label}", { letter, label }) : label);
  const items = entries.map(([name, label, letter]) => make("li", {}, make("i", { className: name }), textOf(label, letter)));
  stage.append(make("ul", { className: "legend" }, ...items));
}

/** Radio buttons; the first one is checked. */
export function choice(stage, title, options, onChange) {
  const name = `choice-${document.querySelectorAll(".choices").length}`;
  const set = make("fieldset", {}, make("legend", { textContent: translate(title) }));
  options.forEach(([value, label], index) => {
    const input = make("input", { type: "radio", name, value, checked: index === 0 });
    input.addEventListener("change", () => onChange(value));
    set.append(make("label", {}, input, ` ${label}`));
  });
  stage.append(make("div", { className: "choices" }, set));
}
