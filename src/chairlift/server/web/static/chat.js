/** The chat page. */

import { ApiError, request } from "./api.js";
import { Conversations, title } from "./conversations.js";
import { copyText } from "./copy.js";
import { readMessages } from "./event_stream.js";
import { formatCount, formatNumber, formatSeconds, plural, waitsByReason } from "./format.js";
import { StreamedMarkdown } from "./markdown.js";
import { isRepeating } from "./repetition.js";

const PARAMETERS = ["temperature", "top_p", "max_tokens", "seed"];
const SEAT = "The row of the batch that computed this answer, step by step, and why it waited";
const CONTEXT_CODE = "context_length_exceeded";
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
    this.stopped = make("p", "stopped");
    this.timing = make("p", "timing");
    this.actions = make("div", "actions");
    this.root.append(this.reasoning, this.content, this.problem, this.stopped, this.timing, this.actions);
    this.update();
  }

  update() {
    const { message } = this;
    this.reasoning.hidden = !message.reasoning;
    this.reasoningText.textContent = message.reasoning ?? "";
    if (this.markdown) this.markdown.update(message.content);
    else this.content.textContent = message.content;
    this.problem.textContent = message.error ?? "";
    this.stopped.textContent = message.stopped ?? "";
    this.#updateTiming();
  }

  #updateTiming() {
    const { message } = this;
    this.timing.replaceChildren(message.timing ?? "");
    if (message.timing && message.requestId) {
      const page = message.model ? `./?model=${encodeURIComponent(message.model)}` : "./";
      const href = `${page}#request=${encodeURIComponent(message.requestId)}`;
      const link = Object.assign(make("a", "", "its seat on the live page"), { href, title: SEAT });
      this.timing.append("; ", link);
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
  const shown = views.map((view) => view.root);
  if (firstSent()) shown.splice(firstSent(), 0, make("p", "empty cut", "The messages above are no longer sent to the model."));
  if (shown.length) log.replaceChildren(...shown);
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
    if (last.message.isContextFull) addWaysOut(last);
    last.actions.append(button(last.message.error ? "Try again" : "Regenerate", regenerate));
    if (last.message.content) last.actions.append(button("Copy", () => copyText(last.message.content)));
  }
  const lastOfUser = views.findLast((view) => view.message.role === "user");
  lastOfUser?.actions.append(button("Edit", edit));
}

/** The ways out of a full context. The messages of a single turn cannot be reduced. */
function addWaysOut({ message, actions }) {
  const { messages } = store.current;
  const turns = [...messages.keys()].slice(firstSent()).filter((index) => messages[index].role === "user");
  const keepLastTurns = () => {
    store.current.firstSent = turns[Math.ceil(turns.length / 2)];
    delete message.isContextFull;
    store.save();
    if (message.error) regenerate();
    else showConversation();
    input.focus();
  };
  if (turns.length > 1) actions.append(button("Continue with the last turns", keepLastTurns));
  actions.append(button("Begin a new conversation", () => element("new").click()));
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

function firstSent() {
  return store.current.firstSent ?? 0;
}

function requestBody() {
  const { elements } = element("settings");
  const body = { model: element("model").value || undefined, stream: true, stream_options: { include_usage: true } };
  for (const name of PARAMETERS) if (elements[name].value !== "") body[name] = Number(elements[name].value);
  const system = elements.system.value ? [{ role: "system", content: elements.system.value }] : [];
  const sent = store.current.messages.slice(firstSent()).filter((message) => message.role === "user" || message.content);
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
    if (error.name === "AbortError") message.stopped ??= "Stopped by you.";
    else message.error = error instanceof ApiError ? error.message : "The connection was lost before the end of the answer.";
    if (error.code === CONTEXT_CODE) message.isContextFull = true;
  }
  running = null;
  setRunning(view, false);
  if (!store.save()) message.error = "The storage of this browser is full: delete a conversation.";
  element("announcement").textContent = message.error ?? `${message.stopped ?? ""} Answer: ${message.content.slice(0, 300)}`;
  showConversation();
  await addTiming(message);
  store.save();
  const shown = views.find((entry) => entry.message === message);
  if (shown) draw(shown);
}

async function stream(body, message, view, signal) {
  const response = await requestAnswer(body, signal);
  let isDrawn = true;
  const drawAgain = () => {
    isDrawn = true;
    draw(view);
  };
  await readMessages(response.body, (_kind, chunk) => {
    if (chunk.error) throw new ApiError(500, chunk.error);
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
    if (isRepeating(message.content) || isRepeating(message.reasoning ?? "")) {
      message.stopped = "Stopped: the answer repeats itself.";
      running.controller.abort();
      signal.throwIfAborted();
    }
  });
  if (!message.finishReason) throw new Error("the stream ended early");
  if (message.finishReason === "length") markLimit(message, body.max_tokens);
}

/** Send the request. Its limit may exceed the rest of the context, which then limits the answer. */
async function requestAnswer(body, signal) {
  const send = (sent) =>
    request("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent), signal });
  try {
    return await send(body);
  } catch (error) {
    if (error.code !== CONTEXT_CODE || error.param !== "max_tokens") throw error;
    delete body.max_tokens;
    return send(body);
  }
}

/** Say which limit an answer reached: its own, or the context of the model. */
function markLimit(message, limit) {
  message.isContextFull = limit === undefined || message.numTokens < limit;
  message.stopped = message.isContextFull
    ? "Stopped: the conversation is as long as the model can read."
    : `Stopped at the limit of ${plural(limit, "token")} per answer.`;
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
      message.wait = waitsByReason(explained.sequences[0].waits).join("; ");
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
addEventListener("input", (event) => {
  if (event.target.form?.id !== "settings") return;
  store.current.settings[event.target.name] = event.target.value;
  store.save();
});
element("settings").addEventListener("submit", (event) => event.preventDefault());

function showSettings() {
  for (const field of element("settings").elements) if (field.name) field.value = store.current.settings[field.name] ?? field.defaultValue;
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
