/** Chapter 5: block tables of requests with a common prefix, and the blocks that they name. */

import { plural } from "./format.js";
import { translate } from "./language.js";
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
  stage.append(caption, make("h3", { textContent: translate("Block tables") }), tables, make("h3", { textContent: translate("The pool") }), pool);
  legend(stage, [
    ["shared", translate("in several tables")],
    ["owned", translate("in one table")],
    ["cached", translate("free, the prefix is still known")],
    ["cell-empty", translate("free")],
  ]);
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
    const place = { id, names: names.join(", ") };
    button.setAttribute("aria-label", translate(names.length ? "Block {id}, in the tables of {names}" : "Block {id}, free", place));
  }

  function draw(step) {
    const state = replay.after(step);
    const held = heldBlocks(state);
    const running = state.running().sort((a, b) => a.order - b.order);
    caption.textContent = translate("{blocks} in use. Without sharing, {more} would be.", {
      blocks: plural(held.size, "block"),
      more: plural(state.step.saved / size, "more block"),
    });
    running.forEach((entry, row) => {
      const line = tables.children[row] ?? tables.appendChild(make("div", { className: "table" }, make("span")));
      line.firstChild.textContent = translate("{name}: {tokens}", { name: entry.id, tokens: plural(entry.computed, "token") });
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
    const text = state.cached[id]
      ? "Block {id} is free. It still has the K and V of a prefix: a request that begins in the same way takes it back."
      : "Block {id} is free.";
    return translate(text, { id });
  }
  const first = block.position * size;
  const names = block.owners.map((entry) => entry.id).join(", ");
  return translate(
    block.owners.length > 1
      ? "Block {id} has the K and V of tokens {first} to {last} of requests {names}. Their texts begin in the same way, so it was computed once and is stored once."
      : "Block {id} has the K and V of tokens {first} to {last} of request {names}. It is line {line} of the table: any block of the pool would do.",
    { id, names, first: first + 1, last: first + size, line: block.position + 1 },
  );
}
