"""Check of lm-eval: log-probabilities and generated texts of completions, with the tokenizer of the server."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

ROWS = [
    {"question": "The capital of France is", "choices": [" Paris", " Banana"], "answer": 0},
    {"question": "Two and two is", "choices": [" blue", " four"], "answer": 1},
]
CHOICES = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
TEXTS = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}


def main() -> None:
    """Evaluate two small tasks."""
    with tempfile.TemporaryDirectory() as folder:
        (rows := Path(folder, "rows.jsonl")).write_text("\n".join(map(json.dumps, ROWS)))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test"}
        tasks = [
            {"task": name, **data, "doc_to_text": "{{question}}", **options}
            for name, options in (("choices", CHOICES), ("texts", TEXTS))
        ]
        found = simple_evaluate(
            "local-completions",
            model_args={
                "base_url": f"{os.environ['CHAIRLIFT_URL']}/v1/completions",
                "model": "smollm2-135m-instruct",
                "tokenizer_backend": "remote",
                "num_concurrent": 2,
            },
            tasks=tasks,
            task_manager=TaskManager(include_defaults=False),
        )
    assert found["results"]["choices"]["acc,none"] == 1, found["results"]
    assert len(found["samples"]["texts"]) == len(ROWS)
    print("lm-eval: log-probabilities and generated texts with the remote tokenizer")


if __name__ == "__main__":
    main()
