/** Chapter 6: sliders over results of the simulator. */

import { formatNumber, formatPercent } from "./format.js";
import { translate } from "./language.js";
import { KINDS, Shares } from "./memory.js";
import { legend, make, stageOf } from "./stage.js";

export function explorerChapter(data) {
  const stage = stageOf("explorer");
  const sliders = [
    slider("Seats (the largest batch)", data.seats, 2),
    slider("Spread of answer lengths", data.spreads, 2),
    slider("max_tokens", data.limits, 2),
    slider("Order of the queue", data.orders, 0),
  ];
  stage.append(make("div", { className: "sliders" }, ...sliders.map((each) => each.element)));
  const rows = data.policies.map(({ name, title }) => {
    const shares = new Shares(KINDS);
    const speed = make("div", { className: "speed" }, make("span"));
    const text = make("p", { className: "muted" });
    stage.append(make("h3", { textContent: translate(title) }), speed, shares.element, text);
    return { name, shares, speed, text };
  });
  const result = (name) => {
    const [seats, spread, limit, order] = sliders.map((each) => each.value());
    const own = name === "paged" ? order : data.declaring.includes(name) ? limit : "";
    return data.results[`${name}|${seats}|${spread}|${own}`];
  };
  legend(stage, [["speed-key", translate("output tokens per second")], ...KINDS.map(([, name, letter, label]) => [name, label, letter])]);
  const note = translate(
    "{requests} requests at once. The step times differ from the measured ones by {error} (median). The KV memory is that of the runs above, max_tokens matters only where it is reserved, and the order of the queue is that of the paged policy: srpt knows the lengths, mlfq does not.",
    { requests: data.num_requests, error: formatPercent(data.error) },
  );
  stage.append(make("p", { className: "muted", textContent: note }));

  function draw() {
    const fastest = Math.max(...data.policies.map(({ name }) => result(name).speed));
    for (const { name, shares, speed, text } of rows) {
      const values = result(name);
      speed.firstChild.style.width = `${(100 * values.speed) / fastest}%`;
      speed.firstChild.textContent = translate("{speed} tokens/s", { speed: values.speed.toFixed(0) });
      text.textContent = translate("Latency: median {p50} s, P99 {p99} s. Seats in use {seats}, with work {busy}.", {
        p50: formatNumber(values.p50),
        p99: formatNumber(values.p99),
        seats: formatNumber(values.seats),
        busy: formatNumber(values.busy),
      });
      const fields = KINDS.map(([field]) => values[field]);
      shares.draw(fields, KINDS.map(([field, , , label]) => `${label} ${formatPercent(values[field])}`).join(translate(", ")));
    }
  }

  function slider(title, options, position) {
    const input = make("input", { type: "range", min: "0", max: String(options.length - 1), step: "1", value: String(position) });
    const shown = make("b");
    const name = () => {
      shown.textContent = translate(String(options[input.value]));
      input.setAttribute("aria-valuetext", shown.textContent);
    };
    input.addEventListener("input", () => {
      name();
      draw();
    });
    name();
    return { element: make("label", {}, translate("{title}: ", { title: translate(title) }), shown, input), value: () => options[input.value] };
  }
  draw();
}
