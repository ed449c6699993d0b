"""The declaration of an option: a field of a dataclass with its type, its default, its help, and the values it takes.

The command line, the environment variables, the configuration files and the tables of the documentation are derived
from these fields by `chairlift.option_sources`, and their values are checked when a record of them is created.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift.policy_class import is_class_name, load_class

_KEY: Final = "option"

_ADVICE: Final = {
    "-m -hf -hfr --hf-repo": "use model",
    "-m -hf -hfr --hf-repo --model": "write the model without the name of an option, as in `chairlift COMMAND MODEL`",
    "gpu_memory_utilization": "use kv_cache_memory_bytes",
    "-c n_ctx ctx_size": "use max_model_len",
    "-np parallel": "use max_num_seqs",
    "-b -ub batch_size ubatch_size": "use max_num_batched_tokens",
    "-t threads n_threads": "use num_threads",
    "-a alias": "use served_model_name",
    "-ctk -ctv cache_type_k cache_type_v": "use kv_cache_dtype",
    "-md model_draft speculative_model num_speculative_tokens": "use speculative_config",
    "-ngl n_gpu_layers -tp tensor_parallel_size pipeline_parallel_size -dp data_parallel_size": "leave it out, "
    "because an engine uses one device; replicas of it share the requests",
    "trust_remote_code": "leave it out, because code of a model is never run",
    "enable_lora": "leave it out, because lora_modules and max_loras allocate memory for adapters",
    "compilation_config": "leave it out, because nothing is compiled before it runs; see enforce_eager",
    "-fa flash_attn attention_backend": "leave it out, because kernels selects the implementation of attention",
    "-cb cont_batching enable_chunked_prefill": "leave it out, because prompts are always computed in chunks",
    "jinja enable_auto_tool_choice enable_reasoning": "leave it out, because tools and reasoning are always enabled",
    "default_chat_template_kwargs": "leave it out, and set these arguments in each request",
    "task runner embedding embeddings": "leave it out, because the model determines the task",
    "revision": "download the revision with `hf download`, and give its folder as the model",
    "download_dir": "set the environment variable HF_HOME",
    "guided_decoding guided_json guided_regex guided_choice guided_grammar grammar json_schema": "use "
    "structured_outputs",
    "enable_thinking thinking": "use chat_template_kwargs",
    "format": "use response_format",
    "-n --predict --n-predict": "use override_generation_config, as in '{\"max_new_tokens\": 256}'",
    "n_predict num_predict max_output_tokens": "use max_tokens",
    "best_of": "leave it out, because answers are not ranked",
    "disable_log_requests uvicorn_log_level": "use access_log_format=none",
}
FOREIGN_OPTIONS: Final = {
    name: [advice for names, advice in _ADVICE.items() if name in names.split()] for name in " ".join(_ADVICE).split()
}
"""Options of vLLM and llama.cpp that an engine or server does not have, with advice in the order of preference."""

VALUE_ADVICE: Final = {
    "dtype": "it is the type of activations; set quantization for weights, or kv_cache_dtype for K and V",
}
"""Option -> what to do about a value of it that other engines have."""

_OPTION_NAME: Final = re.compile(r'(?<=\buse )[a-z_]+|(?<![\w"])[a-z]+(?:_[a-z]+)+')
"""The name of an option in advice: the word after `use`, and each name of several words without quotation marks."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a field declares about its option in addition to its type and its default.

    Attributes:
        help: one or two sentences with the meaning, the unit, and the default if it is not a constant.
        choices: the values that the option can have.
        minimum: the smallest value.
        maximum: the largest value; it needs a minimum.
        parse: converts text, or the texts of a repeated option, to the value. Its second argument is the name of the
            option, for the message of a ConfigError.
        is_repeated: the option can be given several times on the command line.
        takes_several: one occurrence of a repeated option takes all values up to the next option.
        is_positional: the values, which are a list, are arguments of the command line without a name.
        name: the name of the option, if it differs from the name of the field.
        short_name: a second name on the command line, such as "-m".
        base_class: the full name of a class; module:Class, which is derived from it, is a value beside the choices.
    """

    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float = math.inf
    parse: Callable[[Any, str], Any] | None = None
    is_repeated: bool = False
    takes_several: bool = False
    is_positional: bool = False
    name: str | None = None
    short_name: str | None = None
    base_class: str | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects options of a record where it is a parameter or a field: `Annotated[EngineConfig, Selection(...)]`.

    Attributes:
        only: the fields that are options; empty for all.
        without: fields that are not options.
    """

    only: Sequence[str] = ()
    without: Sequence[str] = ()

    def has(self, name: str) -> bool:
        """Whether the field is an option."""
        return name not in self.without and (not self.only or name in self.only)


def option(default: Any, help: str, **about: Any) -> Any:  # noqa: A002
    """Declare a field of a dataclass as an option.

    Args:
        default: the default of the field; MISSING if the option is required.
        about: further attributes of `Option`.
    """
    return field(default=default, metadata={_KEY: Option(help, **about)})


def declared_options(record: type[Any]) -> dict[str, Option]:
    """The options that a dataclass declares, by the name of the field."""
    return {each.name: each.metadata[_KEY] for each in fields(record) if _KEY in each.metadata}


def unknown_option(name: str, known: Sequence[str]) -> str:
    """The message about an unknown option, with advice, the known name that is close to it, or all known names."""
    close = get_close_matches(name, known, 1)
    hint = f": did you mean {close[0]}?" if close else f"; options are {', '.join(known)}"
    if advice := foreign_advice(name, known):
        hint = f": {advice}"
    return f"{name} is not an option{hint}"


def foreign_advice(name: str, known: Iterable[str], own_names: Mapping[str, str] | None = None) -> str | None:
    """The advice about an option of vLLM or llama.cpp; None for other options, and if it names one that is not known.

    Args:
        name: the unknown option. The advice spells the names of options like it.
        known: the options that exist there.
        own_names: name of an option in the table of advice -> its name there, if it differs.
    """
    words, renamed = name.lstrip("-").replace("-", "_"), own_names or {}
    own = {each.lstrip("-").replace("-", "_") for each in known}
    for advice in (*FOREIGN_OPTIONS.get(name, ()), *FOREIGN_OPTIONS.get(words.removeprefix("no_"), ())):
        if own.issuperset(renamed.get(each, each) for each in _OPTION_NAME.findall(advice)):
            if name == words:
                return _OPTION_NAME.sub(lambda found: renamed.get(found[0], found[0]), advice)
            return _OPTION_NAME.sub(lambda found: "--" * (name[0] == "-") + found[0].replace("_", "-"), advice)
    return None


def not_a_choice(place: str, choices: Sequence[str], value: object) -> str:
    """The message about a value that an option cannot have.

    Args:
        place: the name of the option, perhaps after its source.
    """
    advice = VALUE_ADVICE.get(place.rpartition(" ")[2].lstrip("-"))
    return f"{place} must be one of {', '.join(choices)}, got {value!r:.80}" + (f": {advice}" if advice else "")


def check_options(record: Any, declared_by: type[Any] | None = None) -> None:
    """Parse the values of options that are text, and check the values. `__post_init__` of a record calls it.

    Args:
        declared_by: the dataclass that declares the options, if the record has some of its fields; None is its own.

    Raises:
        ConfigError: a value has another form, or is outside of the declared ones, or is None without being the default.
    """
    owner = declared_by or type(record)
    required = {each.name for each in fields(owner) if each.default is not None and hasattr(record, each.name)}
    for name, declared in declared_options(owner).items():
        value = getattr(record, name, None)
        if declared.parse is not None and isinstance(value, str | list):
            value = declared.parse(value, declared.name or name)
            object.__setattr__(record, name, value)
        if value is None and name in required:
            raise ConfigError(f"{name} must have a value, got None: leave it out for the default")
        if value is None:
            continue
        for each in value if isinstance(value, tuple) else (value,):
            if declared.base_class is not None and is_class_name(str(each)):
                load_class(each, name, declared.base_class)
            elif declared.choices and each not in declared.choices:
                own = () if declared.base_class is None else ("or module:Class",)
                raise ConfigError(not_a_choice(name, (*declared.choices, *own), each))
            if declared.minimum is not None:
                _check_range(name, each, declared.minimum, declared.maximum)


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    kind, types = ("an integer", (int,)) if isinstance(low, int) else ("a number", (int, float))
    if isinstance(value, bool) or not isinstance(value, types):
        raise ConfigError(f"{name} must be {kind}, got {value!r:.80}")
    if not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low:g}, got {value}")
    if value > high:
        raise ConfigError(f"{name} must be at most {high:.0f}, got {value}")


def object_parser(example: str) -> Callable[[str, str], dict[str, Any]]:
    """The `parse` of an option that is a JSON object. It raises ConfigError with the example for other text."""

    def parse(text: str, name: str) -> dict[str, Any]:
        value = _parse_json(text)
        if not isinstance(value, dict) or not value:
            raise ConfigError(f"{name} must be a JSON object such as {example}, got {text!r:.100}")
        return value

    return parse


def parse_names(text: str | Sequence[str], name: str) -> tuple[str, ...]:
    """Parse a JSON list of texts. Raises ConfigError if it is not one."""
    value = _parse_json(text) if isinstance(text, str) else text
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"""{name} must be a JSON list of strings such as '["*"]', got {text!r:.100}""")
    return tuple(value)


def split_names(text: str | Sequence[str], name: str) -> tuple[str, ...]:
    """Split "a,b", or the same as a JSON list, without empty parts."""
    value = _parse_json(text) if isinstance(text, str) else text
    parts = value if isinstance(value, list) else str(text).split(",")
    return tuple(part.strip() for part in map(str, parts) if part.strip())


def parse_weights(given: str | Mapping[str, Any], name: str) -> dict[str, float]:
    """Parse "a=1,b=2.5", or the same as a JSON object or a mapping, to a positive weight for each name.

    Raises:
        ConfigError: the text has another form, a weight is not positive, or a name occurs twice.
    """
    weights: dict[str, float] = {}
    for part, key, number in _pairs(given.split(",") if isinstance(given, str) else (), given):
        try:
            weight = float(number)
        except (TypeError, ValueError):
            weight = math.nan
        if not key or key in weights or not 0 < weight < math.inf:
            raise ConfigError(
                f"{name} must be name=weight pairs such as a=1,b=2.5 with weights above 0, got {part!r} in {given!r}"
            )
        weights[key] = weight
    return weights


def parse_paths(items: str | Sequence[str], name: str) -> dict[str, str] | None:
    """Parse items "name=path", or {"name": name, "path": path} as in vLLM, or all of them as one JSON object or list.

    Raises:
        ConfigError: an item has another form, or a name occurs twice.
    """
    texts = [items] if isinstance(items, str) else items
    listed = _parse_json(texts[0]) if len(texts) == 1 else None
    paths: dict[str, str] = {}
    for item in listed if isinstance(listed, list) else texts:
        for _text, key, path in _pairs([item if isinstance(item, str) else ""], _without_names(item)):
            if not key or not path or not isinstance(path, str) or key in paths:
                raise ConfigError(f"{name} must be name=path with distinct names, got {item!r:.200}")
            paths[key] = path
    return paths or None


def _without_names(item: Any) -> Any:
    """The form {name: path} of an item that has vLLM's form, with no name if it is wrong; any other item as it is."""
    record = _parse_json(item) if isinstance(item, str) else item
    if not isinstance(record, Mapping) or not {"name", "path"} <= record.keys():
        return record
    is_valid = isinstance(record["name"], str) and record.keys() <= {"name", "path", "base_model_name"}
    return {record["name"] if is_valid else "": record["path"]}


def _pairs(items: Sequence[str], text: str | Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The text, name and value of items "name=value", or of the members of a JSON object."""
    value = _parse_json(text) if isinstance(text, str) else text
    if isinstance(value, Mapping):
        yield from ((f"{key}={each}", key, each) for key, each in value.items())
        return
    for item in items:
        key, _equals, each = item.partition("=")
        yield item, key, each


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
