/**
 * Renders Markdown as DOM nodes. Text becomes text nodes only and no HTML is ever parsed, so tags in the text of a
 * model are shown, not executed. Links have the schemes http, https or mailto; images are links and are not loaded.
 * The time is linear in the length of the text.
 */

import { copyText } from "./copy.js";

const MAX_DEPTH = 16;
const MAX_LABEL = 1000;
const MAX_URL = 2000;
const SAFE_URL = /^(https?:\/\/|mailto:)/i;

/**
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  for (const block of splitBlocks(text)) fragment.append(renderBlock(block));
  return fragment;
}

/**
 * Renders a text that grows: blocks that have not changed keep their nodes.
 */
export class StreamedMarkdown {
  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  update(text) {
    const blocks = splitBlocks(text);
    let same = 0;
    while (same < blocks.length && same < this.sources.length && blocks[same] === this.sources[same]) same++;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of blocks.slice(same)) this.element.append(renderBlock(block));
    this.sources = blocks;
  }
}

// -- blocks ---------------------------------------------------------------------------------------------------------

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^\|? *:?-+:? *(\| *:?-+:? *)*\|?$/;

/** The source of each block of a text. A block begins at a line that cannot continue the block before it. */
function splitBlocks(text) {
  const blocks = [];
  let lines = [];
  let kind = null;
  let fence = "";
  const end = () => {
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
    kind = null;
  };
  for (const line of text.split("\n")) {
    if (kind === "code") {
      lines.push(line);
      if (isFenceEnd(line, fence)) end();
      continue;
    }
    const next = lineKind(line);
    if (next === "blank") {
      if (kind === "list") lines.push(line);
      else end();
      continue;
    }
    if (kind === "text" && lines.length > 1 && isTableRule(line, lines.at(-1))) {
      const head = lines.pop();
      end();
      kind = "text";
      lines.push(head);
    }
    const isIndented = /^\s/.test(line);
    const isItem = next === "list" && (isIndented || isOrdered(line) === isOrdered(lines[0] ?? line));
    const isContinued = kind === "list" && (isItem || isIndented || (next === "text" && lines.at(-1) !== ""));
    if (!isContinued && (next !== kind || next === "list" || next === "heading" || next === "rule" || next === "code")) end();
    if (!isContinued || kind === null) kind = kind ?? next;
    if (kind === "code") fence = FENCE.exec(line)[1];
    lines.push(line);
    if (kind === "heading" || kind === "rule") end();
  }
  end();
  return blocks;
}

function lineKind(line) {
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return "text";
}

function isOrdered(line) {
  return /^ *\d/.test(line);
}

function isTableRule(line, head) {
  return head.includes("|") && TABLE_RULE.test(line.trim());
}

function isFenceEnd(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function renderBlock(source, depth = 0) {
  const lines = source.split("\n");
  const kind = lineKind(lines[0]);
  if (kind === "code") return renderCode(lines);
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    // The headings of an answer are below those of the page.
    const heading = document.createElement(`h${Math.min(6, marks.length + 2)}`);
    appendInline(heading, text.replace(/ +#+ *$/, ""));
    return heading;
  }
  if (kind === "rule") return document.createElement("hr");
  if (depth < MAX_DEPTH && kind === "quote") {
    const quote = document.createElement("blockquote");
    for (const block of splitBlocks(lines.map((line) => line.replace(QUOTE, "")).join("\n"))) {
      quote.append(renderBlock(block, depth + 1));
    }
    return quote;
  }
  if (depth < MAX_DEPTH && kind === "list") return renderList(lines, depth);
  if (lines.length > 1 && isTableRule(lines[1], lines[0])) return renderTable(lines);
  const paragraph = document.createElement("p");
  appendInline(paragraph, source);
  return paragraph;
}

function renderCode(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const isClosed = lines.length > 1 && isFenceEnd(lines.at(-1), fence);
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const box = document.createElement("div");
  box.className = "code";
  const bar = document.createElement("div");
  bar.append(Object.assign(document.createElement("span"), { textContent: language || "text" }));
  const copy = Object.assign(document.createElement("button"), { type: "button", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    await copyText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  bar.append(copy);
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  pre.append(Object.assign(document.createElement("code"), { textContent: text }));
  box.append(bar, pre);
  return box;
}

function renderList(lines, depth) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const list = document.createElement(isOrdered(lines[0]) ? "ol" : "ul");
  if (isOrdered(lines[0])) list.start = Number.parseInt(marker, 10);
  let item = [];
  const end = () => {
    if (!item.length) return;
    const element = document.createElement("li");
    const blocks = splitBlocks(item.join("\n"));
    for (const block of blocks) {
      const node = renderBlock(block, depth + 1);
      if (node.nodeName === "P" && blocks[0] === block) element.append(...node.childNodes);
      else element.append(node);
    }
    list.append(element);
    item = [];
  };
  let width = 0;
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent.length + 1) {
      end();
      width = match[0].length;
      item.push(line.slice(width));
    } else {
      const spaces = /^ */.exec(line)[0].length;
      item.push(line.slice(Math.min(width, spaces)));
    }
  }
  end();
  return list;
}

function renderTable(lines) {
  const table = document.createElement("table");
  const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/);
  const head = table.createTHead().insertRow();
  for (const text of cells(lines[0])) {
    const cell = document.createElement("th");
    appendInline(cell, text.trim());
    head.append(cell);
  }
  const body = table.createTBody();
  for (const line of lines.slice(2)) {
    const row = body.insertRow();
    for (const text of cells(line).slice(0, head.cells.length)) appendInline(row.insertCell(), text.trim());
  }
  const box = document.createElement("div");
  box.className = "scroll";
  box.tabIndex = 0;
  box.append(table);
  return box;
}

// -- inline ---------------------------------------------------------------------------------------------------------

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/** Append the inline content of a text to an element. */
function appendInline(parent, text, depth = 0) {
  let plain = 0;
  let index = 0;
  const missing = new Set(); // marks that do not occur again, so that they are searched for once
  const flush = () => {
    if (index > plain) appendText(parent, text.slice(plain, index));
  };
  while (index < text.length) {
    const found = depth < MAX_DEPTH ? inlineAt(text, index, missing, depth) : null;
    if (found === null) {
      index++;
      continue;
    }
    flush();
    parent.append(found.node);
    index = plain = found.end;
  }
  flush();
}

function appendText(parent, text) {
  for (const [number, line] of text.split("\n").entries()) {
    if (number) parent.append(document.createElement("br"));
    if (line) parent.append(document.createTextNode(line));
  }
}

function inlineAt(text, index, missing, depth) {
  const char = text[index];
  if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[index + 1] ?? "")) {
    return { node: document.createTextNode(text[index + 1]), end: index + 2 };
  }
  if (char === "`") return codeAt(text, index, missing);
  if (char === "[" || (char === "!" && text[index + 1] === "[")) return linkAt(text, index, depth);
  if (char === "<") return autolinkAt(text, index);
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark, index)) continue;
    const end = markEnd(text, index, mark, missing);
    if (end === -1) continue;
    const node = document.createElement(name);
    appendInline(node, text.slice(index + mark.length, end), depth + 1);
    return { node, end: end + mark.length };
  }
  return null;
}

function markEnd(text, index, mark, missing) {
  const start = index + mark.length;
  if (missing.has(mark) || /\s|^$/.test(text[start] ?? "")) return -1;
  // An underscore within a word is part of the word.
  if (mark[0] === "_" && /\w/.test(text[index - 1] ?? "")) return -1;
  let end = text.indexOf(mark, start + 1);
  while (end !== -1 && (/\s/.test(text[end - 1]) || (mark.length === 1 && text[end + 1] === mark))) {
    end = text.indexOf(mark, end + (text[end + 1] === mark ? 2 : 1));
  }
  if (end === -1) missing.add(mark);
  else if (mark.length === 2 && text[end + 2] === mark[0]) end++; // ***both***
  return end;
}

function codeAt(text, index, missing) {
  let start = index;
  while (text[start] === "`") start++;
  const fence = text.slice(index, start);
  if (missing.has(fence)) return { node: document.createTextNode(fence), end: start };
  const end = text.indexOf(fence, start);
  if (end === -1) {
    missing.add(fence);
    return { node: document.createTextNode(fence), end: start };
  }
  const node = Object.assign(document.createElement("code"), { textContent: text.slice(start, end).replace(/\n/g, " ") });
  return { node, end: end + fence.length };
}

function linkAt(text, index, depth) {
  const start = text[index] === "!" ? index + 2 : index + 1;
  // Labels and URLs are bounded, so that many opening brackets take linear time.
  const [label, ...rest] = text.slice(start, start + MAX_LABEL).split("](", 2);
  if (!rest.length || label.includes("[") || label.includes("\n")) return null;
  const middle = start + label.length;
  const end = targetEnd(text, middle + 2);
  if (end === -1) return null;
  const [url] = text.slice(middle + 2, end).trim().split(/\s/);
  if (!SAFE_URL.test(url)) return { node: document.createTextNode(text.slice(index, end + 1)), end: end + 1 };
  const node = link(url);
  appendInline(node, label || url, depth + 1);
  return { node, end: end + 1 };
}

/** The closing parenthesis of the target of a link; the target may contain pairs of parentheses. */
function targetEnd(text, start) {
  let numOpen = 0;
  for (let index = start; index < Math.min(text.length, start + MAX_URL) && text[index] !== "\n"; index++) {
    if (text[index] === "(") numOpen++;
    else if (text[index] === ")" && numOpen-- === 0) return index;
  }
  return -1;
}

function autolinkAt(text, index) {
  const [url, ...rest] = text.slice(index + 1, index + 1 + MAX_URL).split(">", 2);
  if (!rest.length) return null;
  const end = index + 1 + url.length;
  if (!SAFE_URL.test(url) || /\s/.test(url)) return null;
  const node = link(url);
  node.textContent = url;
  return { node, end: end + 1 };
}

function link(url) {
  const node = document.createElement("a");
  node.href = url;
  node.rel = "noopener noreferrer";
  node.target = "_blank";
  return node;
}
