"""The program that compares shown outputs with those of a run."""

from __future__ import annotations

from tools.docs_check import DOCUMENTS, ROOT, missing_line, shown_outputs

TEXT = """
  ```
  $ chairlift version
  1.2.3
  $ chairlift report paged.jsonl
  not run
  ```

```
curl -s http://127.0.0.1:8000/v1/models \\
  -d '{}'
```

```json
{"id":"chatcmpl-12ab","stop_reason":2}
```
"""


def test_commands_with_an_output_are_found() -> None:
    found = [*shown_outputs("a.md", TEXT)]
    assert [each.command for each in found] == [
        "chairlift version",
        "curl -s http://127.0.0.1:8000/v1/models    -d '{}'",
    ]
    assert found[0].lines == ["1.2.3"]


def test_only_numbers_ids_and_spaces_may_differ() -> None:
    (_version, call) = shown_outputs("a.md", TEXT)
    assert missing_line(call.lines, ['{"id":"chatcmpl-77","stop_reason":9}']) is None
    assert missing_line(call.lines, ['{"id":"chatcmpl-77","stop_reason":null}']) == call.lines[0]
    assert missing_line(["a 1 MiB", "...", "b"], ["x", "a  22.5 GiB", "y", "b"]) is None
    assert missing_line(["b", "a"], ["a", "b"]) == "a", "the order counts"


def test_the_documents_have_outputs_to_check() -> None:
    found = [
        each
        for pattern in DOCUMENTS
        for file in ROOT.glob(pattern)
        for each in shown_outputs(file.name, file.read_text(encoding="utf-8"))
    ]
    assert len({each.document for each in found}) >= 5
    assert any(each.document == "README.md" and "stop_reason" in each.lines[0] for each in found)
