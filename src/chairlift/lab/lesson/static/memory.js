/** Chapters 3 and 4: the slots of one request, and the blocks of the pool. */

import { formatPercent, plural } from "./format.js";
import { translate } from "./language.js";
import { MemoryMapView } from "./memory_map.js";
import { waitText } from "./request_facts.js";
import { WORDS } from "./words.js";
import { choice, Facts, legend, make, numberOf, Player, stageOf } from "./stage.js";

/** The kinds of slots: field of a step, class, letter and name. */
export const KINDS = [
  ["token_states", "decode", "T", translate(WORDS.token_states)],
  ["reserved", "reserved", "R", translate("{kind}: written later", { kind: translate(WORDS.reserved) })],
  ["internal", "internal", "I", translate("{kind}: never written", { kind: translate(WORDS.internal) })],
  ["external", "external", "E", translate("{kind}: lost to rounding, or free but too small", { kind: translate(WORDS.external) })],
  ["free", "cell-empty", "F", translate(WORDS.free)],
];

/** A bar that is divided into parts, each with a class, a letter and a share. */
export class Shares {
  constructor(kinds) {
    this.parts = kinds.map(([, name, letter]) => make("span", { className: `part ${name}` }, make("b", { textContent: letter })));
    this.element = make("div", { className: "shares" }, ...this.parts);
  }

  draw(shares, text) {
    this.parts.forEach((part, index) => {
      part.style.width = `${100 * shares[index]}%`;
      part.classList.toggle("small", shares[index] < 0.05);
    });
    this.element.setAttribute("role", "img");
    this.element.setAttribute("aria-label", text);
  }
}

/** Chapter 3. */
export function memoryChapter(replays, titles) {
  const stage = stageOf("memory");
  const policies = Object.keys(replays).filter((name) => name !== "static");
  const first = replays.max.after(1);
  const members = [...first.requests.values()].filter((entry) => entry.state === "running");
  let id = null;
  choice(stage, "Request", members.map((entry) => [entry.id, numberOf(entry)]), choose);
  const player = new Player(stage, 1, draw);
  const size = first.started.max_model_len;
  const rows = policies.map((name) => {
    const shares = new Shares(KINDS.slice(0, 3));
    const text = make("p", { className: "muted" });
    stage.append(make("h3", { textContent: titles[name] }), shares.element, text);
    return { name, shares, text };
  });
  stage.append(make("p", { className: "muted", textContent: translate("The whole line is {size} slots, the longest that a request may be.", { size }) }));
  legend(stage, KINDS.slice(0, 3).map(([, name, letter, label]) => [name, label, letter]));

  function choose(chosen) {
    id = chosen;
    const lengths = policies.map((name) => replays[name].columns.findLastIndex((column) => column.ids.includes(id)));
    player.setLength(Math.min(...lengths));
    player.pause(Math.round(0.4 * player.numSteps));
  }

  function draw(step) {
    for (const { name, shares, text } of rows) {
      const entry = replays[name].after(step).requests.get(id);
      const held = entry.blocks.length * first.started.block_size;
      const written = entry.computed;
      const reserved = Math.max(0, Math.min(held, entry.prompt + entry.outputLen - 1) - written);
      const counts = [written, reserved, held - written - reserved];
      text.textContent = translate("{slots} held: {written} written, {reserved} for later, {unused} never used. Others may use {others}.", {
        slots: plural(held, "slot"),
        written,
        reserved,
        unused: counts[2],
        others: size - held,
      });
      shares.draw(counts.map((count) => count / size), text.textContent);
    }
  }
  choose(members[0].id);
}

/** Chapter 4. */
export function poolChapter(replays, titles) {
  const stage = stageOf("pool");
  let policy = "max";
  let selected = null;
  choice(stage, "Policy", Object.keys(replays).filter((name) => name !== "static").map((name) => [name, titles[name]]), (name) => {
    policy = name;
    player.setLength(replays[name].columns.length);
    player.pause();
  });
  const player = new Player(stage, replays.max.columns.length, draw);
  const caption = make("p", { className: "caption" });
  const canvas = make("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  const status = make("p", { className: "sr-only" });
  status.setAttribute("role", "status");
  const shares = new Shares(KINDS);
  stage.append(caption, shares.element, make("div", { className: "canvas-box" }, canvas), status);
  legend(stage, KINDS.map(([, name, letter, label]) => [name, label, letter]));
  const facts = new Facts(stage, "");
  const map = new MemoryMapView(canvas, status, (id) => {
    selected = id;
    player.show(player.step);
  });

  function draw(step) {
    const state = replays[policy].after(step);
    const counts = KINDS.map(([field]) => state.step[field]);
    const total = counts.reduce((sum, count) => sum + count, 0);
    const running = state.running().length;
    const parts = KINDS.map(([, , letter], index) => `${letter} ${formatPercent(counts[index] / total)}`).join(translate(", "));
    caption.textContent = translate("{requests} in the batch. {parts}.", { requests: plural(running, "request"), parts });
    shares.draw(counts.map((count) => count / total), caption.textContent);
    map.draw(state, { by: "kind", scope: "all", selected });
    const head = state.requests.get(state.head);
    const waits = head
      ? translate("Request {number} waits: {reason}.", { number: numberOf(head), reason: waitText(head, state) })
      : translate("No request is waiting.");
    facts.show(state.requests.get(selected), state, translate("{waits} Select a block to see its request.", { waits }));
  }
  player.show(Math.round(0.4 * player.numSteps));
  for (const event of ["resize", "themechange"]) addEventListener(event, () => player.show(player.step));
}
