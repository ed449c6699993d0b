/** The language of the page: English, or one of docs/texts.json. */

import { TEXTS } from "./texts.js";

const root = document.documentElement;

/** The languages with their own names. */
export const LANGUAGES = { en: "English", "zh-TW": "繁體中文" };

/** The language of `?lang=` in the address, or of the command that wrote the page, or of the browser. */
export const LANGUAGE = [new URLSearchParams(location.search).get("lang"), root.dataset.lang].find((name) =>
  Object.hasOwn(LANGUAGES, name),
) ?? (/^zh-(TW|HK|MO|Hant)/i.test(navigator.language) ? "zh-TW" : "en");

const texts = new Map(Object.entries(TEXTS[LANGUAGE] ?? {}));

/** An English text in the language of the page. `{name}` in it is replaced by the value with this name, which may be a
 * text and its values in turn. */
export function translate(text, values = {}) {
  const valueOf = (value) => (Array.isArray(value) ? translate(...value) : value);
  return (texts.get(text) ?? text).replace(/\{(\w+)\}/g, (unknown, name) => valueOf(values[name]) ?? unknown);
}

/** Translate the HTML of the page: whole paragraphs, and other texts and labels. Scripts have not changed it yet. */
export function translatePage() {
  root.lang = LANGUAGE;
  if (!texts.size) return;
  for (const paragraph of document.querySelectorAll("p")) {
    const translated = texts.get(paragraph.innerHTML.trim().replace(/\s+/g, " "));
    if (translated) paragraph.innerHTML = translated;
  }
  for (const element of document.querySelectorAll("title, body *:not(script)")) {
    for (const node of element.childNodes) if (node.nodeType === Node.TEXT_NODE) node.data = translateWords(node.data);
    for (const name of ["aria-label", "placeholder"]) {
      if (element.hasAttribute(name)) element.setAttribute(name, translate(element.getAttribute(name)));
    }
  }
}

/** A text with its white space at both ends. */
function translateWords(text) {
  return text.replace(/\S(?:[^]*\S)?/, (words) => translate(words.replace(/\s+/g, " ")));
}
