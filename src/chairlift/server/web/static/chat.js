/** The chat page. */

import { ApiError, request } from "./api.js";
import { Conversations, title } from "./conversations.js";
import { copyText } from "./copy.js";
import { readMessages } from "./event_stream.js";
import { formatCount, formatNumber, formatSeconds } from "./format.js";
import { StreamedMarkdown } from "./markdown.js";

const SETTINGS = ["temperature", "top_p", "max_tokens", "seed"];
const NOTICEABLE_SECONDS = 0.05;

const element = (id) => document.getElementById(id);
const store = new Conversations();
const log = element("log");
const input = element("input");

/** The answer in progress. */
let running = null;

/** The messages of the shown conversation. */
let views = [];

// -- messages -------------------------------------------------------------------------------------------------------

/** The elements of one message, which are updated while it grows. */
class MessageView {
  /** @param {import("./conversations.js").Message} message */
  constructor(message) {
    this.message = message;
    this.root = make("article", `message ${message.role}`);
    this.root.append(make("h2", "", message.role === "user" ? "You" : "Answer"));
    this.reasoning = make("details", "reasoning");
    this.reasoningText = make("div");
    this.reasoning.append(make("summary", "", "Reasoning"), this.reasoningText);
    this.content = make("div", "content");
    this.markdown = message.role === "assistant" ? new StreamedMarkdown(this.content) : null;
    this.problem = make("p", "problem");
    this.timing = make("p", "timing");
    this.actions = make("div", "actions");
    this.root.append(this.reasoning, this.content, this.problem, this.timing, this.actions);
    this.update();
  }

  update() {
    const { message } = this;
    this.reasoning.hidden = !message.reasoning;
    this.reasoningText.textContent = message.reasoning ?? "";
    if (this.markdown) this.markdown.update(message.content);
    else this.content.textContent = message.content;
    this.problem.textContent = message.error ?? "";
    this.#updateTiming();
  }

  #updateTiming() {
    const { message } = this;
    const parts = [message.timing ?? ""];
    if (message.finishReason === "length") parts.push("ended at the maximum number of tokens");
    this.timing.replaceChildren(parts.filter(Boolean).join(", "));
    if (message.timing && message.requestId) {
      const page = message.model ? `./?model=${encodeURIComponent(message.model)}` : "./";
      const href = `${page}#request=${encodeURIComponent(message.requestId)}`;
      const link = Object.assign(make("a", "", "its lane"), { href });
      this.timing.append(", ", link);
    }
    if (message.wait) this.timing.append(make("br"), message.wait);
  }

  setRunning(isRunning) {
    this.content.classList.toggle("cursor", isRunning);
    this.root.setAttribute("aria-busy", String(isRunning));
  }
}

function make(name, className = "", text = "") {
  return Object.assign(document.createElement(name), { className, textContent: text });
}

function button(text, action) {
  const made = Object.assign(make("button", "", text), { type: "button" });
  made.addEventListener("click", action);
  return made;
}

function showConversation() {
  const { messages } = store.current;
  views = messages.map((message) => new MessageView(message));
  if (views.length) log.replaceChildren(...views.map((view) => view.root));
  else log.replaceChildren(make("p", "empty", "Send a message to begin."));
  addActions();
  log.scrollTop = log.scrollHeight;
  showList();
}

/** The last answer can be generated again, and the last message of the user can be changed. */
function addActions() {
  if (running) return;
  const last = views.at(-1);
  if (last?.message.role === "assistant") {
    last.actions.append(button(last.message.error ? "Try again" : "Regenerate", regenerate));
    if (last.message.content) last.actions.append(button("Copy", () => copyText(last.message.content)));
  }
  const lastOfUser = views.findLast((view) => view.message.role === "user");
  lastOfUser?.actions.append(button("Edit", edit));
}

function showList() {
  const items = store.list.map((conversation) => {
    const item = document.createElement("li");
    const choice = button(title(conversation), () => {
      stop();
      store.select(conversation);
      showConversation();
      showSettings();
    });
    if (conversation === store.current) choice.setAttribute("aria-current", "true");
    item.append(choice);
    return item;
  });
  element("conversations").replaceChildren(...items);
}

// -- answers --------------------------------------------------------------------------------------------------------

function requestBody() {
  const { messages, settings } = store.current;
  const body = { model: element("model").value || undefined, stream: true, stream_options: { include_usage: true } };
  for (const name of SETTINGS) if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const sent = messages.filter((message) => message.role === "user" || message.content);
  body.messages = [...system, ...sent.map(({ role, content }) => ({ role, content }))];
  return body;
}

async function answer() {
  const body = requestBody();
  /** @type {import("./conversations.js").Message} */
  const message = { role: "assistant", content: "" };
  if (element("model").options.length > 1) message.model = body.model;
  store.current.messages.push(message);
  running = { controller: new AbortController() };
  store.save();
  showConversation();
  const view = views.at(-1);
  setRunning(view, true);
  try {
    await stream(body, message, view, running.controller.signal);
  } catch (error) {
    if (error.name === "AbortError") message.finishReason = "stopped";
    else message.error = error instanceof ApiError ? error.message : "The connection was lost before the end of the answer.";
  }
  running = null;
  setRunning(view, false);
  if (!store.save()) message.error = "The storage of this browser is full: delete a conversation.";
  element("announcement").textContent = message.error ?? `Answer: ${message.content.slice(0, 300)}`;
  showConversation();
  await addTiming(message);
  store.save();
  const shown = views.find((entry) => entry.message === message);
  if (shown) draw(shown);
}

async function stream(body, message, view, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await request("v1/chat/completions", options);
  let isDrawn = true;
  const drawAgain = () => {
    isDrawn = true;
    draw(view);
  };
  await readMessages(response.body, (_kind, chunk) => {
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    message.requestId ??= chunk.id;
    if (chunk.usage) message.numTokens = chunk.usage.completion_tokens;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    message.content += choice.delta.content ?? "";
    const reasoning = choice.delta.reasoning_content ?? choice.delta.reasoning;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    if (choice.finish_reason) message.finishReason = choice.finish_reason;
    if (isDrawn) requestAnimationFrame(drawAgain);
    isDrawn = false;
  });
  if (!message.finishReason) throw new Error("the stream ended early");
}

/** Draw a message again; the end stays in view. */
function draw(view) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  view.update();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

/** Ask the server how long each part of the request took. */
async function addTiming(message) {
  if (!message.requestId) return;
  try {
    const path = `v1/requests/${encodeURIComponent(message.requestId)}`;
    const { sequences } = await (await request(path)).json();
    const { timings, ...sequence } = sequences[0];
    const first = timings.time_to_first_token;
    const parts = [`queue ${formatSeconds(timings.queue_time)}`];
    if (first !== null) {
      parts.push(`prefill ${formatSeconds(first - timings.queue_time)}`);
      parts.push(`${formatCount(sequence.num_cached_tokens)} of ${formatCount(sequence.num_prompt_tokens)} prompt tokens cached`);
      parts.push(`${formatCount(sequence.num_output_tokens)} tokens in ${formatSeconds(timings.last_token - first)}`);
      if (timings.time_per_output_token) parts.push(`${formatNumber(1 / timings.time_per_output_token)} tokens/s`);
    }
    message.timing = parts.join(", ");
    if (timings.queue_time > NOTICEABLE_SECONDS) {
      const explained = await (await request(`${path}/explain`)).json();
      message.wait = explained.sequences[0].waits[0]?.spans.map((span) => span.text).join("; ");
    }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
  }
}

function setRunning(view, isRunning) {
  view.setRunning(isRunning);
  element("send").hidden = isRunning;
  element("stop").hidden = !isRunning;
}

function stop() {
  running?.controller.abort();
}

function regenerate() {
  store.current.messages.pop();
  answer();
}

/** Take the last message of the user back into the input. */
function edit() {
  const { messages } = store.current;
  const index = messages.findLastIndex((message) => message.role === "user");
  input.value = messages[index].content;
  messages.length = index;
  store.save();
  showConversation();
  input.focus();
}

// -- controls -------------------------------------------------------------------------------------------------------

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (!text || running) return;
  const { messages } = store.current;
  if (messages.at(-1)?.role === "assistant" && !messages.at(-1).content) messages.pop();
  messages.push({ role: "user", content: text });
  input.value = "";
  answer();
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("composer").requestSubmit();
  }
});
element("stop").addEventListener("click", stop);
addEventListener("pagehide", () => {
  if (running) store.save();
});
addEventListener("storage", () => {
  store.takeOver();
  showList();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
element("new").addEventListener("click", () => {
  stop();
  store.create();
  showConversation();
  showSettings();
  input.focus();
});
element("delete").addEventListener("click", () => {
  if (store.current.messages.length && !confirm("Delete this conversation? It cannot be restored.")) return;
  stop();
  store.removeCurrent();
  showConversation();
  showSettings();
});
element("export").addEventListener("click", () => {
  const blob = new Blob([JSON.stringify(store.current, null, 2)], { type: "application/json" });
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: "conversation.json" });
  link.click();
  URL.revokeObjectURL(link.href);
});
element("settings").addEventListener("input", (event) => {
  store.current.settings[event.target.name] = event.target.value;
  store.save();
});
element("settings").addEventListener("submit", (event) => event.preventDefault());

function showSettings() {
  for (const field of element("settings").elements) if (field.name) field.value = store.current.settings[field.name] ?? "";
}

async function showModels() {
  try {
    const { data } = await (await request("v1/models")).json();
    element("model").replaceChildren(...data.map(({ id }) => Object.assign(document.createElement("option"), { value: id, textContent: id })));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    element("announcement").textContent = error.message;
  }
}

if (matchMedia("(max-width: 760px)").matches) element("side").open = false;
showSettings();
showConversation();
showModels();
input.focus();
