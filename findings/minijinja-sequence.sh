#!/bin/bash
# Two engines of Jinja disagree whether a text or a mapping is a sequence.
#
# Expected: a chat template gives the same prompt with jinja2 (transformers) and with minijinja (servers in Rust).
# Seen (minijinja 3.1.0, jinja2 3.1.6, 2026-11-30): "is sequence" is true for texts and mappings in jinja2 and false in
# minijinja; both say "is iterable". The test for a list that templates use, "is sequence and is not string", is thus true
# for a mapping in jinja2 only.
#
# Ends with 1 if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet minijinja==3.1.0 jinja2==3.1.6
"$folder/venv/bin/python" - <<'PYTHON'
import jinja2
import minijinja

VALUES = {"text": "a", "mapping": {"type": "text"}, "list": ["a"]}
SOURCE = "{{ 'yes' if value is sequence else 'no' }}, {{ 'yes' if value is iterable else 'no' }}"
EXPECTED = {"text": ("yes, yes", "no, yes"), "mapping": ("yes, yes", "no, yes"), "list": ("yes, yes", "yes, yes")}
for name, value in VALUES.items():
    seen = (
        jinja2.Environment().from_string(SOURCE).render(value=value),
        minijinja.Environment().render_str(SOURCE, value=value),
    )
    print(f"{name}: sequence and iterable in jinja2: {seen[0]}; in minijinja: {seen[1]}")
    assert seen == EXPECTED[name], "this has changed"
PYTHON
