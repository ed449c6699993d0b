/** Chapter 5: block tables of requests with a common prefix, and the blocks that they name. */

import { plural } from "./format.js";
import { heldBlocks } from "./memory_map.js";
import { legend, make, Player, stageOf } from "./stage.js";

export function sharingChapter(replay) {
  const stage = stageOf("sharing");
  let selected = 0;
  const player = new Player(stage, replay.columns.length, draw);
  const caption = make("p", { className: "caption" });
  const tables = make("div", { className: "tables" });
  const pool = make("div", { className: "pool" });
  const { num_blocks: numBlocks, block_size: size } = replay.after(1).started;
  const cells = Array.from({ length: numBlocks }, (_, id) => blockButton(id));
  pool.append(...cells);
  const text = make("p", { className: "facts" });
  text.setAttribute("role", "status");
  stage.append(caption, make("h3", { textContent: "Block tables" }), tables, make("h3", { textContent: "The pool" }), pool);
  legend(stage, [["shared", "in several tables"], ["owned", "in one table"], ["cached", "free, the prefix is still known"], ["cell-empty", "free"]]);
  stage.append(text);

  function blockButton(id) {
    const button = make("button", { type: "button" }, make("b", { textContent: String(id) }), make("small"));
    button.dataset.block = id;
    button.addEventListener("click", () => {
      selected = id;
      player.pause();
    });
    return button;
  }

  function dress(button, id, held, state) {
    const names = held.get(id)?.owners.map((entry) => entry.id) ?? [];
    const kind = names.length > 1 ? "shared" : names.length ? "owned" : state.cached[id] ? "cached" : "cell-empty";
    button.className = `block ${kind}${id === selected ? " selected" : ""}`;
    button.lastChild.textContent = names.join("") || (state.cached[id] ? "·" : "");
    button.setAttribute("aria-label", `Block ${id}, ${names.length ? `in the tables of ${names.join(", ")}` : "free"}`);
  }

  function draw(step) {
    const state = replay.after(step);
    const held = heldBlocks(state);
    const running = state.running().sort((a, b) => a.order - b.order);
    caption.textContent =
      `${plural(held.size, "block")} in use. Without sharing, ${plural(state.step.saved / size, "more block")} would be.`;
    running.forEach((entry, row) => {
      const line = tables.children[row] ?? tables.appendChild(make("div", { className: "table" }, make("span")));
      line.firstChild.textContent = `${entry.id}: ${plural(entry.computed, "token")}`;
      entry.blocks.forEach((id, position) => {
        let button = line.children[position + 1];
        if (button?.dataset.block !== String(id)) {
          const fresh = blockButton(id);
          if (button) button.replaceWith(fresh);
          else line.append(fresh);
          button = fresh;
        }
        dress(button, id, held, state);
      });
      while (line.children.length > entry.blocks.length + 1) line.lastChild.remove();
    });
    while (tables.children.length > running.length) tables.lastChild.remove();
    cells.forEach((cell, id) => dress(cell, id, held, state));
    text.textContent = describe(held.get(selected), selected, state, size);
  }
  player.show(6);
}

function describe(block, id, state, size) {
  if (!block) {
    return state.cached[id]
      ? `Block ${id} is free. It still has the K and V of a prefix: a request that begins in the same way takes it back.`
      : `Block ${id} is free.`;
  }
  const first = block.position * size;
  const names = block.owners.map((entry) => entry.id).join(", ");
  const where = `the K and V of tokens ${first + 1} to ${first + size} of ${block.owners.length > 1 ? "requests" : "request"} ${names}`;
  return block.owners.length > 1
    ? `Block ${id} has ${where}. Their texts begin in the same way, so it was computed once and is stored once.`
    : `Block ${id} has ${where}. It is line ${block.position + 1} of the table: any block of the pool would do.`;
}
