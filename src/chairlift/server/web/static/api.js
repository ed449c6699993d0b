/** Calls of the server's API with the key of this page. */

import { translate } from "./language.js";

const KEY_NAME = "chairlift-api-key";

/** An error response of the server with its code and the field that caused it, or a connection that failed (`status` 0). */
export class ApiError extends Error {
  constructor(status, { message, code, param }) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

export function apiKey() {
  return sessionStorage.getItem(KEY_NAME) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY_NAME, key);
  else sessionStorage.removeItem(KEY_NAME);
}

/**
 * Send a request with the key. If the server answers 401, ask for a key and try again.
 *
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<Response>} a response with a status below 400
 * @throws {ApiError}
 */
export async function request(path, options = {}) {
  for (;;) {
    const response = await send(path, options);
    if (response.status === 401) {
      await askForKey(apiKey() ? translate("The server does not know this API key.") : "");
      continue;
    }
    if (!response.ok) throw new ApiError(response.status, await errorOf(response));
    return response;
  }
}

/** The query of requests about the model that the page shows, which its address names if there are several. */
export function modelQuery() {
  const given = new URLSearchParams(location.search);
  const chosen = ["model", "replica"].filter((name) => given.has(name)).map((name) => [name, given.get(name)]);
  return chosen.length ? `?${new URLSearchParams(chosen)}` : "";
}

/**
 * Send a body as JSON and return the JSON of the first line of the response. The rest is read until its end, because
 * the server works for it as long as the page reads.
 *
 * @param {() => void} onEnd called when the response has ended
 */
export async function postAndFollow(path, body, onEnd) {
  const headers = { "Content-Type": "application/json" };
  const response = await request(path, { method: "POST", headers, body: JSON.stringify(body) });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (!text.includes("\n")) {
    const { value, done } = await reader.read();
    if (done) break;
    text += value;
  }
  readToEnd(reader).finally(onEnd);
  return JSON.parse(text);
}

async function readToEnd(reader) {
  try {
    while (!(await reader.read()).done);
  } catch {
    // The connection was lost, and the work ended with it.
  }
}

async function send(path, options) {
  const headers = new Headers(options.headers);
  if (apiKey()) headers.set("Authorization", `Bearer ${apiKey()}`);
  try {
    return await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: translate("The server cannot be reached.") });
  }
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return { ...error };
  } catch {
    return { message: translate("The server answered with status {status}.", { status: response.status }) };
  }
}

let pendingKey = null;

/** Show the dialog for the key; several calls wait for the same dialog. */
function askForKey(problem) {
  pendingKey ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const form = dialog.querySelector("form");
    dialog.querySelector("[data-problem]").textContent = problem;
    form.onsubmit = () => {
      setApiKey(form.elements.key.value.trim());
      form.elements.key.value = "";
      pendingKey = null;
      resolve();
    };
    dialog.oncancel = (event) => event.preventDefault();
    dialog.showModal();
  });
  return pendingKey;
}
