"""One field of a dataclass is an option everywhere: command line, environment, file, Python and documentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from cyclopts import App, CycloptsError
from docs.option_tables import option_tables, options_page

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.option_sources import Given, parse_error, read_options, service_sources, with_options
from chairlift.options import Selection, check_options, option
from chairlift.system.memory_amounts import parse_memory

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class PumpOptions:
    OPTION_GROUP: ClassVar = "Pump"

    speed: int = option(3, "Litres per second.", minimum=1, maximum=10**9)
    mode: str = option("slow", "How it runs.", choices=("slow", "fast"))
    tank: int = option(1 << 30, "Size of the tank, such as 2GiB.", parse=parse_memory)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class LargerPumpOptions(PumpOptions):
    """The options with one more, which is declared by one line."""

    pressure: float = option(1.5, "Pressure in bar.", minimum=0.5)


def run(*arguments: str, only: tuple[str, ...] = ()) -> tuple[LargerPumpOptions, Given]:
    """Parse a command line, the environment and a file as `chairlift serve` does."""
    taken: list[Any] = []

    def take(*, values: Any, given: Given) -> None:
        taken.append((values, given))

    take.__annotations__["values"] = Annotated[LargerPumpOptions, Selection(only=only)]
    app = App(config=service_sources(), result_action="return_value")
    app.default(with_options(take))
    try:
        app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise parse_error(error) from None
    return taken[0]  # type: ignore[no-any-return]


def test_one_line_adds_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run()[0].pressure == 1.5
    assert run("--pressure", "2.5") == (LargerPumpOptions(pressure=2.5), {"pressure"})
    monkeypatch.setenv("CHAIRLIFT_PRESSURE", "3.5")
    assert run()[0].pressure == 3.5
    assert read_options(LargerPumpOptions, {"pressure": 2, "speed": 5}) == LargerPumpOptions(speed=5, pressure=3.5)
    assert read_options(LargerPumpOptions, {"pressure": 2}, environment=False).pressure == 2
    assert "| `--pressure` | `1.5` | Pressure in bar. |" in list(option_tables(LargerPumpOptions))
    with pytest.raises(ConfigError, match=r"pressure must be at least 0\.5, got 0\.1"):
        LargerPumpOptions(pressure=0.1)


def test_a_file_and_text_with_a_unit(tmp_path: Path) -> None:
    path = tmp_path / "pump.yaml"
    path.write_text("tank: 2GiB\nmode: fast\n")
    assert read_options(PumpOptions, path) == PumpOptions(tank=2 << 30, mode="fast") == PumpOptions(3, "fast", "2GiB")  # type: ignore[arg-type]
    base = PumpOptions(speed=7)
    assert read_options(PumpOptions, {"mode": "fast"}, base=base) == PumpOptions(speed=7, mode="fast")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speed", "x"], "--speed must be an integer, got 'x'"),
        (["--mode", "warp"], "--mode must be one of slow, fast, got 'warp'"),
        (["--presure", "1"], "Unknown option: --presure. Did you mean --pressure?"),
        (["--speed", "0"], "speed must be at least 1, got 0"),
        (["--speed", "9999999999"], "speed must be at most 1000000000, got 9999999999"),
        (["--tank", "full"], "tank must be a positive amount such as 4GiB"),
    ],
)
def test_errors_name_the_option_the_value_and_the_limit(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as failed:
        run(*arguments)
    assert message in str(failed.value)


def test_an_option_with_a_default_is_never_none() -> None:
    with pytest.raises(ConfigError, match="mode must have a value, got None: leave it out for the default"):
        PumpOptions(mode=None)  # type: ignore[arg-type]
    for name in ("scheduling_policy", "batching", "max_num_seqs"):
        with pytest.raises(ConfigError, match=f"{name} must have a value"):
            EngineConfig(**{name: None})


def test_a_selection_has_only_some_options() -> None:
    with pytest.raises(ConfigError, match="Unknown option: --mode"):
        run("--mode", "fast", only=("speed",))


def test_the_page_of_options_is_the_declared_one() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == options_page(), "run `python -m docs.option_tables > docs/options.md`"
