/** Written by `python -m docs.palette`. */

export const WORDS = {
  "prefill": "prefill",
  "decode": "decode",
  "finished": "last step",
  "preempted": "preempted",
  "padding": "padding",
  "reserved": "reserved",
  "internal": "internal fragmentation",
  "external": "external fragmentation",
  "cached": "cached prefix, free",
  "foreign": "another key",
  "cell-empty": "empty",
  "cell-idle": "not in this step",
  "token_states": "token states",
  "free": "free"
};
