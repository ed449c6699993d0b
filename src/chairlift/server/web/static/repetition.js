/** Detects answers that repeat themselves without an end, as small models do. */

const MIN_CHARACTERS = 400;
const MIN_REPEATS = 6;
const MAX_PIECE = 400;

/** Whether a text ends with the same piece at least six times in a row, and for at least 400 characters. */
export function isRepeating(text) {
  for (let piece = 1; piece <= MAX_PIECE; piece++) {
    const length = Math.max(MIN_CHARACTERS, MIN_REPEATS * piece);
    if (text.length < length) return false;
    const end = text.slice(-length);
    if (end.slice(piece) === end.slice(0, -piece)) return true;
  }
  return false;
}
