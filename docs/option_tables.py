"""Writes the tables of options of the documentation: `python -m docs.option_tables > docs/options.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cyclopts import App

from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.option_sources import with_options
from chairlift.server.serve_options import ServeOptions

INTRODUCTION = """# Options

The options of `chairlift serve`, which are written from their declarations by `python -m docs.option_tables`.
Each of them is also a variable `CHAIRLIFT_NAME`, and `name: value` in the file of `--config`. The fields of
`EngineConfig` are the options of the group *Engine*. [Serving](guide/serving.md) explains how to use them.
"""


def option_tables(record: type[Any], *, as_fields: bool = False) -> Iterator[str]:
    """The lines of a table of options for each group of a record.

    Args:
        as_fields: name the fields of the record instead of options of the command line.
    """

    def take(*, values: Any) -> None: ...

    take.__annotations__["values"] = record
    app = App()
    app.default(with_options(take))
    groups: dict[str, list[str]] = {}
    for argument in app.assemble_argument_collection():
        parameter: Any = argument.parameter
        default = argument.field_info.default
        shown = f"`{default}`" if parameter.show_default else ""
        choices = f" One of {', '.join(f'`{each}`' for each in parameter.choices)}." if parameter.choices else ""
        name = argument.field_info.name if as_fields else argument.name
        row = f"| `{name}` | {shown} | {parameter.help}{choices} |"
        groups.setdefault(parameter.group[0].name, []).append(row)
    for name, rows in groups.items():
        yield from ("", f"## {name}", "", "| option | default | meaning |", "|---|---|---|", *rows)


def options_page() -> str:
    """The page of the documentation."""
    cluster = (
        "",
        "# Arguments of chairlift.cluster:app",
        "",
        "In `args` of a file of Ray Serve. `config` has the options above.",
    )
    lines = (*option_tables(ServeOptions), *cluster, *option_tables(ClusterOptions, as_fields=True))
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(options_page(), end="")
