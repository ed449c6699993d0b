/** Sends bursts of synthetic requests. */

import { ApiError, modelQuery, postAndFollow } from "./api.js";
import { formatCount, plural } from "./format.js";
import { translate } from "./language.js";

/** Each running burst has a connection, and browsers open six to a server. */
const MAX_BURSTS = 3;

/**
 * Send a burst whenever the form is submitted, if the server accepts bursts.
 *
 * @param {object} view the answer of /v1/page
 * @param {() => void} onSent called when the server has accepted a burst
 */
export function enableBursts(view, onSent) {
  const form = document.getElementById("burst-form");
  const status = document.getElementById("burst-status");
  let numRunning = 0;

  async function send() {
    if (numRunning === MAX_BURSTS) return translate("{count} bursts are running: wait until one has ended.", { count: MAX_BURSTS });
    const body = {};
    for (const input of form.querySelectorAll("input")) if (input.value) body[input.name] = Number(input.value);
    status.textContent = translate("Sending …");
    try {
      const { requests } = await postAndFollow(`v1/page/burst${modelQuery()}`, body, () => (numRunning -= 1));
      numRunning += 1;
      // Other prompts next time: the prefix cache would have the same ones already.
      form.elements.seed.value = String(body.seed + 1);
      onSent();
      showBatchAndMemory();
      return describeBurst(requests);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      return error.message;
    }
  }

  form.querySelector("fieldset").disabled = !view.control;
  form.querySelector("fieldset").hidden = Boolean(view.recorded_log);
  document.getElementById("burst-note").textContent = view.control ? "" : controlNote(view);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    status.textContent = await send();
  });
}

/** Scroll to the batch, unless the batch and the memory map are in view. */
function showBatchAndMemory() {
  const batch = document.getElementById("lanes").getBoundingClientRect();
  const map = document.getElementById("memory-map").getBoundingClientRect();
  if (batch.top < 0 || map.bottom > innerHeight) document.getElementById("burst-form").scrollIntoView();
}

/** The numbers of a burst, whose sizes the server has chosen where the form left them open. */
function describeBurst(requests) {
  const range = (name) => {
    const counts = requests.map((each) => each[name]);
    const [low, high] = [Math.min(...counts), Math.max(...counts)];
    return low === high ? formatCount(low) : translate("{low} to {high}", { low: formatCount(low), high: formatCount(high) });
  };
  return translate("{requests} sent: prompts of {prompts} tokens, answers of {answers}, max_tokens {limits}.", {
    requests: plural(requests.length, "request"),
    prompts: range("num_prompt_tokens"),
    answers: range("num_output_tokens"),
    limits: range("max_tokens"),
  });
}

function controlNote(view) {
  if (view.recorded_log) return translate("A recorded log cannot be loaded with requests.");
  return translate(
    "Bursts are off, because the server has API keys or is reachable from other machines. Start it with --page-control to send them.",
  );
}
