"""`chairlift generate`: answers prompts without a server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from chairlift.cli.console import FLAG, MODEL_HELP, SAMPLING_DEFAULTS, check_model, input_errors_explained
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.option_sources import with_options
from chairlift.options import Selection, foreign_advice, unknown_option

if TYPE_CHECKING:
    from chairlift.engine.async_llm import AsyncLLM
    from chairlift.outputs import RequestOutput
    from chairlift.sampling_params import SamplingParams


@with_options
def generate(
    prompt: Annotated[
        list[str] | None,
        Parameter(
            help="One or more prompts, which form one batch. - is the standard input, which is also read if there is "
            "no prompt.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    /,
    *,
    model: Annotated[
        str | None,
        Parameter(name=("--model", "-m"), help=MODEL_HELP, env_var="CHAIRLIFT_MODEL", show_env_var=False),
    ] = None,
    max_tokens: Annotated[int, Parameter(help="Maximum number of output tokens.")] = 256,
    temperature: Annotated[float, Parameter(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, Parameter(help="Probability mass of nucleus sampling.")] = 1.0,
    top_k: Annotated[int, Parameter(help="Sample from the k most likely tokens; 0 samples from all.")] = 0,
    chat: Annotated[bool, Parameter(help="Answer the prompt as a chat message, or continue it as text.")] = True,
    as_json: Annotated[
        bool,
        FLAG,
        Parameter(name="--json", help="Print one line of JSON for each prompt instead of its text."),
    ] = False,
    config: Annotated[EngineConfig, Selection(without=("model", *SAMPLING_DEFAULTS))],
) -> None:
    """Generate text for prompts. The answer to a single prompt is printed as it is generated."""
    from chairlift.sampling_params import SamplingParams

    prompts = _read_prompts(prompt)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    check_model(model, accept_terms=config.accept_terms)
    asyncio.run(_generate(replace(config, model=model), prompts, params, chat, as_json))


def _read_prompts(given: list[str] | None) -> list[str]:
    """The prompts, with the standard input in place of `-`."""
    if not given:
        if sys.stdin.isatty():
            raise ConfigError("PROMPT is missing: give a prompt, or send it to the standard input")
        given = ["-"]
    if unknown := next((text for text in given if text.startswith("-") and text != "-"), None):
        known = [*signature(generate).parameters]
        if foreign_advice(name := unknown.partition("=")[0], known):
            raise ConfigError(unknown_option(name, known))
        raise ConfigError(f"Unknown option: {unknown}. A prompt that begins with - can be sent to the standard input")
    if given.count("-") > 1:
        raise ConfigError("PROMPT - is given twice: the standard input can be read once")
    with input_errors_explained():
        prompts = [sys.stdin.read().rstrip("\n") if text == "-" else text for text in given]
    if "" in prompts:
        raise ConfigError("PROMPT is empty: give a text")
    return prompts


async def _generate(
    config: EngineConfig, prompts: list[str], params: SamplingParams, is_chat: bool, as_json: bool
) -> None:
    from chairlift.engine.async_llm import AsyncLLM

    llm = AsyncLLM(config)
    is_chat = is_chat and llm.engine.tokenizer.has_chat_template
    try:
        if len(prompts) == 1 and not as_json:
            print("" if is_chat else prompts[0], end="", flush=True)
            async for output in _stream(llm, prompts[0], params, is_chat):
                print(output.outputs[0].text, end="", flush=True)
            print()
            return
        answers = await asyncio.gather(*(_collect(_stream(llm, text, params, is_chat)) for text in prompts))
        for text, answer in zip(prompts, answers, strict=True):
            if as_json:
                print(json.dumps({"prompt": text, **answer}, ensure_ascii=False))
            else:
                print(answer["text"].strip() if is_chat else f"{text}{answer['text']}")
    finally:
        await llm.aclose()


def _stream(llm: AsyncLLM, prompt: str, params: SamplingParams, is_chat: bool) -> AsyncIterator[RequestOutput]:
    return llm.chat([{"role": "user", "content": prompt}], params) if is_chat else llm.generate(prompt, params)


async def _collect(outputs: AsyncIterator[RequestOutput]) -> dict[str, Any]:
    """The fields of a whole answer for JSON."""
    text, num_output_tokens, num_cached_tokens = "", 0, 0
    async for output in outputs:
        (answer,) = output.outputs
        text += answer.text
        num_output_tokens += len(answer.token_ids)
        num_cached_tokens += output.num_cached_tokens
    return {
        "text": text,
        "finish_reason": answer.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": num_cached_tokens,
        "num_output_tokens": num_output_tokens,
    }
