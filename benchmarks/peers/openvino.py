"""Compares Chairlift with OpenVINO GenAI, whose process calls ContinuousBatchingPipeline.step().

    python -m benchmarks.peers.openvino [--weights int8,gguf] [--seats 64] [--token-budget 1024] [--chairlift "..."]

int8, int4, fp16: optimum-intel exports the weights of the folder, or those of the GGUF file, dequantized, as an IR
(int8: asymmetric, by channel; int4: by groups of 128). gguf: OpenVINO GenAI reads the file itself. Computations and KV
memory have OpenVINO's default precision.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.peers.compare import Peer, PeerContext, main
from benchmarks.peers.convert import EXPORT_REQUIREMENTS, hf_folder, window_perplexity
from benchmarks.peers.environment import environment, run, torch_requirement
from benchmarks.peers.report import Perplexity
from benchmarks.peers.stage import EngineSetting

from chairlift.errors import ConfigError

REQUIREMENTS = ("openvino-genai", "openvino", "openvino-tokenizers")
EXPORTER = ("optimum-intel", "nncf", "openvino", "openvino-tokenizers")
# optimum-intel 2.2 exports Gemma 3 with transformers up to 5.0 only, and Qwen3.5 with 5.2 only.
TRANSFORMERS = {"qwen3.5": "transformers==5.2.*"}
WEIGHTS = ("int8", "int4", "fp16", "gguf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", help=f"of {', '.join(WEIGHTS)}; default: int8, and gguf or fp16 by the model")
    parser.add_argument("--token-budget", type=int, default=1024, help="OpenVINO's max_num_batched_tokens")
    parser.add_argument("--prompt-lookup", type=int, help="OpenVINO's num_assistant_tokens with prompt lookup")
    parser.add_argument("--cache-gb", type=int, default=1, help="OpenVINO's KV memory")


def settings(context: PeerContext) -> list[EngineSetting]:
    arguments = context.arguments
    python = environment(context.folder / "openvino", REQUIREMENTS)
    chosen = []
    given: str = arguments.weights or ("int8,gguf" if context.is_gguf else "int8,fp16")
    for weights in given.split(","):
        if weights not in WEIGHTS:
            raise ConfigError(f"weights={given}: {weights!r} must be one of {', '.join(WEIGHTS)}")
        if weights == "gguf" and not context.is_gguf:
            raise ConfigError(f"weights={given}: {context.model.path} is no .gguf file: leave gguf out")
        model = context.model.path if weights == "gguf" else ir_folder(context, weights)
        for seats in context.seats([64]):
            options = {
                "model": str(model),
                "seats": seats,
                "token_budget": arguments.token_budget,
                "cache_gb": arguments.cache_gb,
                "num_threads": context.num_threads,
                "prompt_lookup": arguments.prompt_lookup,
            }
            label = f"{weights}, {seats} seats, token budget {arguments.token_budget}"
            if arguments.prompt_lookup is not None:
                label += f", prompt lookup of {arguments.prompt_lookup}"
            chosen.append(EngineSetting(label, "openvino_run", python, options))
    return chosen


def ir_folder(context: PeerContext, weights: str) -> Path:
    """The folder of the IR with weights in this format, which is exported once.

    torchvision, a dependency of optimum, is uninstalled because it does not work with a CPU build of torch.
    """
    target = context.models / f"{context.model_name}-openvino-{weights}"
    if (target / "openvino_model.xml").exists():
        return target
    transformers = TRANSFORMERS.get(context.model.config().architecture, "transformers<5.1")
    requirements = (*EXPORTER, transformers, *EXPORT_REQUIREMENTS, torch_requirement())
    python = environment(context.folder / "export", requirements, unwanted=["torchvision"])
    source = hf_folder(context, python)
    task = ("--task", "text-generation-with-past", "--weight-format", weights)
    run([python.with_name("optimum-cli"), "export", "openvino", *task, "--model", source, target])
    return target


def perplexity(context: PeerContext, setting: EngineSetting, text: Path) -> Perplexity:
    model = Path(setting.options["model"])
    return window_perplexity(context, setting.python, "openvino_perplexity", model, text)


if __name__ == "__main__":
    main(Peer("OpenVINO GenAI", add_arguments, settings, perplexity, has_prefix_cache=True), __doc__)
