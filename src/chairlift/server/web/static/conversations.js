/** The conversations of this browser, in its local storage. */

const STORAGE_KEY = "chairlift-conversations";
const MAX_CONVERSATIONS = 100;

/**
 * @typedef {object} Message
 * @property {"user"|"assistant"} role
 * @property {string} content
 * @property {string} [reasoning]
 * @property {string} [requestId] the id of the response
 * @property {string} [timing]
 * @property {string} [wait] why the request waited
 * @property {string} [error]
 * @property {string} [finishReason]
 * @property {string} [stopped] why the answer ended before its own end
 * @property {boolean} [isContextFull] the conversation is longer than the model can read
 */

/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {Message[]} messages
 * @property {number} [firstSent] the index of the first message that is sent to the model
 * @property {object} settings system prompt and sampling parameters; empty strings are defaults
 */

export class Conversations {
  constructor() {
    /** @type {Conversation[]} */
    this.list = read();
    if (!this.list.length) this.list.push(empty({}));
    this.current = this.list[0];
  }

  create() {
    if (!this.current.messages.length) return;
    this.current = empty(this.current.settings);
    this.list.unshift(this.current);
    this.list.length = Math.min(this.list.length, MAX_CONVERSATIONS);
    this.save();
  }

  select(conversation) {
    this.current = conversation;
  }

  removeCurrent() {
    this.list = this.list.filter((entry) => entry !== this.current);
    if (!this.list.length) this.list.push(empty(this.current.settings));
    this.current = this.list[0];
    this.save();
  }

  /** Take over what another tab has saved. */
  takeOver() {
    this.list = [this.current, ...read().filter((entry) => entry.id !== this.current.id)];
  }

  /** Returns false if the storage of the browser is full. */
  save() {
    try {
      localStorage.setItem(STORAGE_KEY, JSON.stringify(this.list));
      return true;
    } catch {
      return false;
    }
  }
}

export function title(conversation) {
  return conversation.messages[0]?.content.slice(0, 60) || "New conversation";
}

function empty(settings) {
  return { id: crypto.randomUUID?.() ?? String(Math.random()), messages: [], settings: { ...settings } };
}

function read() {
  try {
    const list = JSON.parse(localStorage.getItem(STORAGE_KEY) ?? "[]");
    return list.filter((entry) => Array.isArray(entry.messages) && typeof entry.settings === "object");
  } catch {
    return [];
  }
}
