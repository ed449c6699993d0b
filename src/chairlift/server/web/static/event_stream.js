/** Reads server-sent events with fetch, because EventSource cannot send an API key. */

import { ApiError, request } from "./api.js";
import { translate } from "./language.js";

const MAX_DELAY = 10_000;
/** The server sends at least about one frame a second. A longer silence is a connection that was lost unnoticed. */
const MAX_SILENCE = 20_000;

/**
 * @typedef {object} StreamListener
 * @property {(kind: string, data: object) => void} message
 * @property {(state: "connecting"|"open"|"lost", detail?: string) => void} state
 */

/**
 * Read a stream for ever, with a new connection after each loss.
 *
 * @param {string} path
 * @param {StreamListener} listener
 */
export async function readForever(path, listener) {
  let delay = 500;
  for (;;) {
    listener.state("connecting");
    const abort = new AbortController();
    let timer = 0;
    const restartTimer = () => {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), MAX_SILENCE);
    };
    try {
      const response = await request(path, { signal: abort.signal });
      listener.state("open");
      delay = 500;
      restartTimer();
      await readMessages(response.body, (kind, data) => {
        restartTimer();
        listener.message(kind, data);
      });
      listener.state("lost", translate("The server closed the connection."));
    } catch (error) {
      const detail = error instanceof ApiError ? error.message : translate("The connection was lost.");
      listener.state("lost", detail);
    }
    clearTimeout(timer);
    await new Promise((resolve) => setTimeout(resolve, delay));
    delay = Math.min(MAX_DELAY, 2 * delay);
  }
}

/**
 * Call `onMessage` for each message of a stream of server-sent events.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @param {(kind: string, data: object) => void} onMessage
 */
export async function readMessages(body, onMessage) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let searched = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    let end = buffer.indexOf("\n\n", searched);
    while (end !== -1) {
      deliver(buffer.slice(0, end), onMessage);
      buffer = buffer.slice(end + 2);
      end = buffer.indexOf("\n\n");
    }
    searched = Math.max(0, buffer.length - 1);
  }
}

function deliver(text, onMessage) {
  let kind = "message";
  const data = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  if (data.length && data[0] !== "[DONE]") onMessage(kind, JSON.parse(data.join("\n")));
}
