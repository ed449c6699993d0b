"""Compares the texts per second of Chairlift with sentence-transformers and OpenVINO, on the shape of bge-small.

    python -m benchmarks.embedding_throughput [--texts 512] [--min-len 16] [--max-len 256] [--repeats 3] [--seed 0]
                                              [--num-threads N] [--quantization int8] [--peers NAME ...]
                                              [--json]

The weights are random; every engine computes in float32 and has the same texts. The rounds alternate between the
engines, and each ratio is the median of the ratios of the rounds. The largest difference of a value from Chairlift's is
printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from benchmarks.common import print_result, spread
from benchmarks.peers.environment import default_folder, environment, torch_requirement
from rich.table import Table

from chairlift import LLM

SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB_SIZE: Final = 30522
PEERS: Final = ("sentence-transformers", "openvino")
WORKER: Final = Path(__file__).parent / "peers" / "workers" / "embed.py"
OPENVINO_REQUIREMENTS: Final = (
    "optimum-intel",
    "nncf",
    "openvino",
    "openvino-tokenizers",
    "transformers",
    "gguf",
    "accelerate",
    "sentencepiece",
)


def write_model(folder: Path) -> None:
    """A folder of sentence-transformers with random weights in the shape of bge-small, whose tokens are words."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import models, pre_tokenizers, processors

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1536
    )
    transformers.BertModel(config).save_pretrained(folder)
    words = [*SPECIAL, *(f"w{number}" for number in range(VOCAB_SIZE - len(SPECIAL)))]
    ids = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling", "2_Normalize"):
        (folder / name).mkdir()
    pooling = {"word_embedding_dimension": 384, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_texts(count: int, shortest: int, longest: int, seed: int) -> list[str]:
    """Texts of `shortest` to `longest` tokens, two of which the tokenizer adds."""
    draw = random.Random(seed)
    return [
        " ".join(f"w{draw.randrange(VOCAB_SIZE - len(SPECIAL))}" for _ in range(draw.randint(shortest, longest) - 2))
        for _ in range(count)
    ]


class Peer:
    """A peer in a process of its own."""

    def __init__(self, name: str, folder: Path, texts: Path, threads: int) -> None:
        python: str | Path = sys.executable
        if name == "openvino":
            requirements = [*OPENVINO_REQUIREMENTS, torch_requirement()]
            python = environment(default_folder() / "export", requirements, ["torchvision"])
        command = [python, WORKER, name, folder, texts, threads]
        self._process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while self._line() != "ready\n":
            pass

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the peer has ended; its output is above"
        return line

    def run(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        record: dict[str, Any] = json.loads(self._line())
        return record

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--min-len", type=int, default=16)
    parser.add_argument("--max-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quantization")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chairlift-embed-") as name:
        measure(Path(name), options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    model, file = folder / "model", folder / "texts.json"
    write_model(model)
    texts = make_texts(options.texts, options.min_len, options.max_len, options.seed)
    file.write_text(json.dumps(texts))
    llm = LLM(
        model=str(model), num_threads=options.num_threads, quantization=options.quantization, kernels=options.kernels
    )
    llm.embed(texts[:32], use_tqdm=False)
    peers = {name: Peer(name, model, file, options.num_threads) for name in options.peers}
    seconds: dict[str, list[float]] = {"chairlift": [], **{name: [] for name in peers}}
    differences = dict.fromkeys(peers, 0.0)
    for _ in range(options.repeats):
        started = time.perf_counter()
        own = llm.embed(texts, use_tqdm=False)
        seconds["chairlift"].append(time.perf_counter() - started)
        for name, peer in peers.items():
            record = peer.run()
            seconds[name].append(record["seconds"])
            difference = np.abs(np.array(record["first"]) - np.array(own[: len(record["first"])])).max()
            differences[name] = max(differences[name], float(difference))
    for peer in peers.values():
        peer.close()
    report(seconds, differences, options)


def report(seconds: dict[str, list[float]], differences: dict[str, float], options: argparse.Namespace) -> None:
    table = Table("engine", "texts/s", "Chairlift's speed / this", "largest difference")
    records = []
    for name, times in seconds.items():
        speeds = sorted(options.texts / each for each in times)
        ratio = median(other / own for own, other in zip(seconds["chairlift"], times, strict=True))
        difference = "" if name == "chairlift" else f"{differences[name]:.1e}"
        table.add_row(name, spread(speeds), f"{ratio:.2f}", difference)
        records.append({"engine": name, "texts_per_s": speeds, "ratio": ratio, "difference": differences.get(name)})
    print_result("embedding_throughput", vars(options), records, [table], as_json=options.json)


if __name__ == "__main__":
    main()
