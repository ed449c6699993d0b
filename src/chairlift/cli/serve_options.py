"""The options of `chairlift serve` in addition to the engine's: limits, access, pages, API and observability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from chairlift.cli.option_groups import (
    Command,
    OptionValues,
    option,
    option_group,
    options_from_fields,
    parse_json_object,
    pop_options,
    with_options,
)
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, Event
from chairlift.observability.step_cost import CostLine
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.access.key_reload import KeyReloader
from chairlift.server.access.keys import load_keys
from chairlift.server.http.allowed_hosts import parse_hosts
from chairlift.server.http.cors import CorsOptions, parse_list
from chairlift.server.http.server_limits import HELP, ServerLimits
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.telemetry.observability_options import HELP as OBSERVABILITY_HELP
from chairlift.server.telemetry.observability_options import ObservabilityOptions
from chairlift.server.tools.answer_formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from chairlift.server.web.page_options import HELP as PAGE_HELP
from chairlift.server.web.page_options import PageOptions, SimulatedRequest

LIMITS = options_from_fields(ServerLimits, HELP, "Limits")

ACCESS = [
    option(
        "api_key",
        list[str] | None,
        help="API key that requests must have, as SECRET or NAME=SECRET; safer in the environment.",
        envvar="CHAIRLIFT_API_KEY",
        rich_help_panel="Access",
    ),
    *option_group(
        "Access",
        api_key_file=(Path | None, "File of keys with names, limits and weights: TOML or .jsonl."),
        allow_unauthenticated=(bool, "Listen on other addresses than the loopback without keys.", False),
        allowed_hosts=(
            str | None,
            "Allowed values of the Host header, as a,b,*.c; * allows all. Default on the loopback without keys: its "
            "own names.",
        ),
        ssl_certfile=(Path | None, "Certificate for TLS (PEM)."),
        ssl_keyfile=(Path | None, "Private key of the certificate (PEM)."),
    ),
]

PAGES = options_from_fields(PageOptions, PAGE_HELP, "Browsers")
OBSERVABILITY = options_from_fields(ObservabilityOptions, OBSERVABILITY_HELP, "Observability")

CORS_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")
CORS = option_group(
    "Browsers",
    allowed_origins=(str | None, "Origins of web pages that may call the server, as a JSON list. Default: none."),
    allowed_methods=(str | None, "HTTP methods that these pages may use, as a JSON list. Default: all."),
    allowed_headers=(str | None, "Headers that these pages may send, as a JSON list. Default: all."),
    allow_credentials=(bool, "Allow these pages to send cookies and certificates.", False),
)

SAMPLING = option_group(
    "API",
    generation_config=(
        str,
        "Sampling defaults of requests: auto (of the model), vllm (none), or a folder with generation_config.json.",
        "auto",
    ),
    override_generation_config=(str | None, "Sampling defaults that replace these, as a JSON object."),
)

API = option_group(
    "API",
    tool_call_parser=(
        str,
        f"Format of the model's tool calls: {', '.join(TOOL_CALL_FORMATS)}. auto: from its chat template.",
        "auto",
    ),
    reasoning_parser=(str, f"Format of the model's reasoning: {', '.join(REASONING_FORMATS)}, none or auto.", "auto"),
    chat_template=(Path | None, "Jinja2 file with the chat template. Default: that of the model."),
    allow_special_tokens_in_content=(
        bool,
        "Convert special tokens in message content, so that a message can contain turns of other roles.",
        False,
    ),
)


def add_serve_options(command: Command) -> Command:
    """Add the options of a server to a command.

    The command receives them as `limits`, `access`, `api`, `observability` and `pages`.
    """

    def make(values: OptionValues) -> OptionValues:
        return {
            "limits": ServerLimits(**pop_options(values, LIMITS)),
            "access": _access(values),
            "api": _api(values),
            "observability": ObservabilityOptions(**pop_options(values, OBSERVABILITY)),
            "pages": PageOptions(**pop_options(values, PAGES), simulate_static=simulate_static_batching),
        }

    options = [*LIMITS, *ACCESS, *CORS, *PAGES, *API, *OBSERVABILITY]
    return with_options(command, options, make, "limits", "access", "api", "observability", "pages")


def simulate_static_batching(
    engine: EngineStarted, cost: CostLine, requests: Sequence[SimulatedRequest]
) -> list[Event]:
    """Simulate static batching for the live page. The simulator is imported at the first call."""
    from chairlift.lab.bench.static_comparison import simulate_static_batching

    return simulate_static_batching(engine, cost, requests)


def add_api_options(command: Command) -> Command:
    """Add the options of the API to a command, which receives them as `api`."""
    return with_options(command, API, lambda values: {"api": _api(values)}, "api")


def add_sampling_options(command: Command) -> Command:
    """Add the options of sampling defaults to a command, which receives them in its `config`.

    Options of the engine, which create `config`, must be added around them.
    """

    def make(values: OptionValues) -> OptionValues:
        chosen = pop_options(values, SAMPLING)
        if (text := chosen["override_generation_config"]) is not None:
            example = {"temperature": 0.5}
            chosen["override_generation_config"] = parse_json_object("override_generation_config", text, example)
        return {"config": replace(values.pop("config"), **chosen)}

    return with_options(command, SAMPLING, make)


def _access(values: OptionValues) -> AccessOptions:
    chosen = pop_options(values, ACCESS)
    file, secrets = chosen.pop("api_key_file"), chosen.pop("api_key") or ()
    load = partial(load_keys, file, secrets)
    keys = load()
    reloader = None if file is None else KeyReloader(keys, file, load)
    hosts = chosen.pop("allowed_hosts")
    allowed_hosts = None if hosts is None else parse_hosts(hosts)
    return AccessOptions(keys, cors=_cors(values), allowed_hosts=allowed_hosts, key_reloader=reloader, **chosen)


def _cors(values: OptionValues) -> CorsOptions:
    chosen = pop_options(values, CORS)
    lists = {name: parse_list(name, text) for name in CORS_LISTS if (text := chosen.pop(name)) is not None}
    return CorsOptions(**chosen | lists)


def _api(values: OptionValues) -> ApiOptions:
    chosen = pop_options(values, API)
    file = chosen.pop("chat_template")
    return ApiOptions(chat_template=None if file is None else read_template(file), **chosen)


def read_template(file: Path) -> str:
    """Read a chat template; raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template={str(file)!r} cannot be read: {error}") from None
