/** Canvases in the resolution of the screen, and the colours of the style sheet. */

/** Set the size in CSS pixels and return a context whose unit is one of them. */
export function prepare(canvas, height) {
  const width = Math.max(1, Math.floor(canvas.parentElement.clientWidth));
  const ratio = window.devicePixelRatio || 1;
  const pixelWidth = Math.round(width * ratio);
  const pixelHeight = Math.round(height * ratio);
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

let colors = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colors = new Map();
  window.dispatchEvent(new Event("themechange"));
});

/** The value of a colour variable such as "--decode". */
export function color(name) {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
}

/** Distinct colours for the owners of blocks; a request always has the same one. */
export function ownerColor(order) {
  return color(`--owner-${order % 8}`);
}

const DESCRIPTION_MILLISECONDS = 4000;
const nextDescriptions = new Map();

/** Set the text alternative of a canvas, at most once in some seconds, because a screen reader may read each change. */
export function describeCanvas(canvas, text) {
  const isRecent = nextDescriptions.has(canvas);
  nextDescriptions.set(canvas, text);
  if (isRecent) return;
  canvas.setAttribute("aria-label", text);
  setTimeout(() => {
    const next = nextDescriptions.get(canvas);
    nextDescriptions.delete(canvas);
    if (next !== text) describeCanvas(canvas, next);
  }, DESCRIPTION_MILLISECONDS);
}

export const FONT = "11px system-ui, sans-serif";

const tooltip = document.getElementById("tooltip");

/** Show text lines beside a point of the window; no lines hide it. */
export function showTooltip(lines, x = 0, y = 0) {
  tooltip.hidden = !lines.length;
  if (!lines.length) return;
  tooltip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
  const box = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tooltip.style.top = `${Math.max(4, y + box.height + 20 > innerHeight ? y - box.height - 10 : y + 16)}px`;
}
