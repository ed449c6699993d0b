"""The options of `chairlift serve` beside the engine's: limits, one for each field of ServerLimits, access, and the
API."""

from __future__ import annotations

from pathlib import Path

from chairlift.cli.option_groups import (
    Command,
    OptionValues,
    option,
    options_from_fields,
    pop_options,
    with_options,
)
from chairlift.errors import ConfigError
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.access.keys import load_keys
from chairlift.server.access.server_limits import HELP, ServerLimits
from chairlift.server.api.api_options import ApiOptions
from chairlift.server.http.allowed_hosts import AllowedHosts, parse_hosts
from chairlift.server.http.cors import HELP as CORS_HELP
from chairlift.server.http.cors import CorsOptions, parse_list
from chairlift.server.telemetry.observability_options import HELP as OBSERVABILITY_HELP
from chairlift.server.telemetry.observability_options import ObservabilityOptions
from chairlift.server.tools.call_formats import TOOL_CALL_FORMATS
from chairlift.server.tools.reasoning_parser import REASONING_FORMATS

LIMITS = options_from_fields(ServerLimits, HELP, "Limits")

ACCESS = [
    option(
        "api_key",
        list[str] | None,
        help="A key that callers must bring, as SECRET or NAME=SECRET; better in the environment.",
        envvar="CHAIRLIFT_API_KEY",
        rich_help_panel="Access",
    ),
    option(
        "api_key_file",
        Path | None,
        help="Keys with names, limits and weights: TOML or .jsonl.",
        rich_help_panel="Access",
    ),
    option("allow_unauthenticated", bool, False, help="Serve other machines without a key.", rich_help_panel="Access"),
    option(
        "allowed_hosts",
        str | None,
        help="Hosts that requests may name, as a,b,*.c; * is every host. Without keys on the loopback: its own names.",
        rich_help_panel="Access",
    ),
    option("ssl_certfile", Path | None, help="Certificate (PEM), to serve TLS.", rich_help_panel="Access"),
    option("ssl_keyfile", Path | None, help="Its private key (PEM).", rich_help_panel="Access"),
]

OBSERVABILITY = options_from_fields(ObservabilityOptions, OBSERVABILITY_HELP, "Observability")

CORS_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")
CORS = [option(name, str | None, help=CORS_HELP[name], rich_help_panel="Browsers") for name in CORS_LISTS]
CORS.append(option("allow_credentials", bool, False, help=CORS_HELP["allow_credentials"], rich_help_panel="Browsers"))

API = [
    option(
        "tool_call_parser",
        str,
        "auto",
        help=f"How the model writes tool calls: {', '.join(TOOL_CALL_FORMATS)}; auto goes by its chat template.",
        rich_help_panel="API",
    ),
    option(
        "reasoning_parser",
        str,
        "auto",
        help=f"The same for its reasoning: {', '.join(REASONING_FORMATS)}, none or auto.",
        rich_help_panel="API",
    ),
    option("chat_template", Path | None, help="A Jinja2 file, instead of the model's.", rich_help_panel="API"),
    option(
        "trust_request_chat_template", bool, False, help="Let requests bring a chat template.", rich_help_panel="API"
    ),
    option(
        "allow_special_tokens_in_content",
        bool,
        False,
        help="Read special tokens in message content, so that a message can write turns of its own.",
        rich_help_panel="API",
    ),
]


def add_serve_options(command: Command) -> Command:
    """Add the options of a server to a command.

    The command receives them as `limits`, `access`, `api` and `observability`.
    """

    def make(values: OptionValues) -> OptionValues:
        return {
            "limits": ServerLimits(**pop_options(values, LIMITS)),
            "access": _access(values),
            "api": _api(values),
            "observability": ObservabilityOptions(**pop_options(values, OBSERVABILITY)),
        }

    options = [*LIMITS, *ACCESS, *CORS, *API, *OBSERVABILITY]
    return with_options(command, options, make, "limits", "access", "api", "observability")


def add_api_options(command: Command) -> Command:
    """Give a command those of the API alone; it receives them as `api`."""
    return with_options(command, API, lambda values: {"api": _api(values)}, "api")


def _access(values: OptionValues) -> AccessOptions:
    chosen = pop_options(values, ACCESS)
    keys = load_keys(chosen.pop("api_key_file"), chosen.pop("api_key") or ())
    hosts = chosen.pop("allowed_hosts")
    allowed_hosts = None if hosts is None else AllowedHosts(parse_hosts(hosts))
    return AccessOptions(keys, cors=_cors(values), allowed_hosts=allowed_hosts, **chosen)


def _cors(values: OptionValues) -> CorsOptions:
    chosen = pop_options(values, CORS)
    lists = {name: parse_list(name, text) for name in CORS_LISTS if (text := chosen.pop(name)) is not None}
    return CorsOptions(**chosen | lists)


def _api(values: OptionValues) -> ApiOptions:
    chosen = pop_options(values, API)
    template = _read_template(chosen.pop("chat_template"))
    return ApiOptions(chat_template=template, **chosen)


def _read_template(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template={str(file)!r} cannot be read: {error}") from None
