"""Checks that files, classes, headings, commands, options and errors that documents name exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from cyclopts import MissingArgumentError
from tools.open_webui import FOR_ONE_RUN, SETTINGS

from benchmarks import run_pictures
from chairlift.cli.main import app
from chairlift.lab.sim.model_shape import MODEL_SHAPES
from chairlift.loading.fetch import PACKAGED_MODELS
from support.command_runner import all_commands, find_command, invoke, options_of
from support.native import needs_native
from support.shown_lines import LOG_LINE, OF_FAILURES, OF_THE_START

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "src", "tests", "tools")
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
OF_MODELS = {
    "adapter_config.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "config_sentence_transformers.json",
    "modules.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "processor_config.json",
    "tokenizer_config.json",
}
"""Files that a model's folder has."""

BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`((?:[\w-]+/)*[\w.-]+\.(?:py|md|toml|sh|h|cpp|json))`|`((?:[\w-]+/)+)`")
CLASS = re.compile(r"`([A-Z][a-z]+[A-Z]\w*)[`.(]")
BENCHMARK = re.compile(r"python3? -m (benchmarks[\w.]*)(?:[^`]*`\s+\(at\s+commit\s+([0-9a-f]{8})\))?")
"""A call of a benchmark, and the commit that it is from if it has been removed since."""

DEFINED = re.compile(r"^ *class (\w+)|^ *(\w+)(?:: [^=\n]+)? = |\bimport (?:\(([^)]*)\)|(.*))", re.MULTILINE)


MAX_CELL_WORDS = 12
"""The largest number of words in a cell of the table of features in the README."""


def faults_of(faults: Callable[[Path], Iterable[str]], documents: Iterable[Path] = DOCUMENTS) -> list[str]:
    """What a function finds in the documents, each fault after the name of its document."""
    return [f"{document.relative_to(ROOT)}: {fault}" for document in documents for fault in faults(document)]


@cache
def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


@cache
def prose(document: Path) -> str:
    """The text without its code blocks."""
    return BLOCK.sub("", text_of(document))


@cache
def paths() -> list[str]:
    """Files and folders of the repository, each as /a/b/c with a slash at a folder's end."""
    found = [path for folder in FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    return [f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in [*found, *ROOT.iterdir()]]


@cache
def python_names() -> set[str]:
    """The names that sources and tests define, assign or import."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    defined = [match for file in files for match in DEFINED.findall(file.read_text(encoding="utf-8"))]
    return {name for match in defined for part in match for name in re.findall(r"\w+", part)}


@cache
def anchors(document: Path) -> set[str]:
    """The anchors of the headings."""
    headings = re.findall(r"^#+ +(.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = document.parent / name if name else document
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            yield target


def missing_files(document: Path) -> Iterator[str]:
    named = {file or folder for file, folder in FILE.findall(prose(document))} - OF_MODELS
    return (name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in paths()))


def missing_classes(document: Path) -> list[str]:
    return sorted(set(CLASS.findall(prose(document))) - python_names())


def commands(document: Path) -> Iterator[list[str]]:
    """The calls of `chairlift` in code blocks, without pipes, redirections and comments."""
    for block in BLOCK.findall(text_of(document)):
        for line in block.replace("\\\n", " ").splitlines():
            call = re.match(r"(?:\$ )?(?:\w+=\S+ )*chairlift ([^|&>#]*)", line)
            if call is not None:
                yield shlex.split(call[1])


def calls_with_wrong_options(document: Path) -> Iterator[str]:
    for call in commands(document):
        given = {word.strip("[]").partition("=")[0] for word in call if word.lstrip("[").startswith("--")}
        if not given <= options_of(*command_of(call)) | {"--help", "--version"}:
            yield shlex.join(call)


def test_commands_take_their_options() -> None:
    assert faults_of(calls_with_wrong_options) == []


def command_of(call: list[str]) -> list[str]:
    """The names of the command that the words of a call begin with. Raises KeyError if there is none."""
    names: list[str] = []
    for word in call:
        if word.startswith("-") or (names and word not in find_command(names)):
            break
        find_command([*names, word])
        names.append(word)
    return names


GUIDES = sorted(
    [
        ROOT / "README.md",
        ROOT / "docs" / "performance.md",
        *(ROOT / "docs").glob("guide/*.md"),
        *(ROOT / "docs").glob("learn/*.md"),
    ]
)
PLACEHOLDER = re.compile(r"\[|\.\.\.|<")
"""What a call contains that shows the form of a command, such as [MODEL ...]."""


def calls_that_are_not_parsed(document: Path) -> Iterator[str]:
    for call in [*commands(document), *quoted_commands(document)]:
        if len(call) > 1 and not PLACEHOLDER.search(shlex.join(call)):
            try:
                parse(call)
            except Exception as error:
                yield f"{shlex.join(call)}: {error!r}"


def test_commands_of_the_guide_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line parses every call of `chairlift`, in a code block or in a line of text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.yaml").write_text("")
    assert faults_of(calls_that_are_not_parsed, GUIDES) == []


def parse(call: list[str]) -> None:
    """Parse the options of a call without running it, and check them."""
    if "--help" in call:
        find_command(command_of(call))
        return
    if "--model" in call[:-1] and not (name := call[call.index("--model") + 1]).isupper():
        assert name in {*PACKAGED_MODELS, *MODEL_SHAPES} or "/" in name or name.endswith(".gguf"), shlex.join(call)
    try:
        app.parse_args(call, exit_on_error=False, print_error=False)
    except MissingArgumentError:  # a command or an option is named without its arguments
        assert len(call) == len(command_of(call)) or call[-1].startswith("--"), shlex.join(call)


def quoted_commands(document: Path, *names: str) -> list[list[str]]:
    """The calls of a command in lines of text."""
    quoted = re.findall(r"`chairlift ([a-z][^`]*)`", prose(document))
    return [call for call in map(shlex.split, quoted) if call[: len(names)] == list(names) and len(call) > len(names)]


def test_comparisons_of_the_readme_run_as_printed(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run with a tiny model and four short requests, and draw the picture."""
    monkeypatch.chdir(tmp_path)
    readme = ROOT / "README.md"
    model = str(tiny_model_dir("llama", max_position_embeddings=512))
    size = ["--model", model, "--skip-tokenizer-init", "--num-threads", "1", "--repeats", "1", "--num-warmups", "0"]
    compared = quoted_commands(readme, "bench", "compare")
    for call in compared:
        assert call[call.index("--kernels") + 1] == "torch"
        for name, value in (("--num-prompts", "4"), ("--output-len", "anyscale:1536/32")):
            call[call.index(name) + 1] = value
        done = invoke([*call, *size])
        assert done.exit_code == 0, done.output
        assert "paged" in done.stdout
    (drawn,) = re.findall(r"`python -m benchmarks.run_pictures ([^`]*)`", prose(readme))
    run_pictures.main([*drawn.split(), "--output", str(tmp_path)])
    assert (tmp_path / "compare-batch.png").is_file()
    assert len(compared) == 2


def test_the_simulation_of_the_readme_runs() -> None:
    (call,) = quoted_commands(ROOT / "README.md", "simulate")
    done = invoke([*call, "--num-prompts", "4"])
    assert "paged" in done.stdout, done.output


def test_log_lines_are_shown_only_where_they_are_compared_with_those_of_runs() -> None:
    shown = {str(path.relative_to(ROOT)) for path in DOCUMENTS if LOG_LINE.search(text_of(path))}
    assert shown == {*OF_THE_START, OF_FAILURES}


def missing_benchmarks(document: Path) -> Iterator[str]:
    for name, commit in BENCHMARK.findall(text_of(document)):
        path = ROOT / name.rstrip(".").replace(".", "/")
        if not commit and not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            yield name


def test_benchmarks_of_documents_exist_or_have_their_commit() -> None:
    assert faults_of(missing_benchmarks) == []


@cache
def options() -> set[str]:
    """The options of all commands and of the scripts in benchmarks/, tests/ and tools/."""
    scripts = [file for folder in ("benchmarks", "tests", "tools") for file in (ROOT / folder).rglob("*.py")]
    quoted = {name for file in scripts for name in re.findall(r'"(--[a-z][a-z-]+)"', file.read_text(encoding="utf-8"))}
    return quoted | {name for names in all_commands() for name in options_of(*names)} | {"--help"}


def unknown_options(document: Path) -> list[str]:
    text = BENCHMARK.sub(lambda call: "" if call[2] else call[0], prose(document))
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - options())


def test_links_files_classes_and_options_are_there() -> None:
    for find in (broken_links, missing_files, missing_classes, unknown_options):
        assert faults_of(find) == [], find.__name__


def test_the_architecture_names_every_package() -> None:
    rows = re.findall(r"^\| (`.*?) \|", prose(ROOT / "docs" / "architecture.md"), re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    packages = {path.parent.name for path in (ROOT / "src" / "chairlift").glob("*/__init__.py")}
    assert packages - named == set()


def test_cells_of_the_table_of_features_are_short() -> None:
    table = text_of(ROOT / "README.md").partition("## What works")[2].partition("\n- ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\\\)\|", re.sub(r"\]\([^)]*\)", "]", row))]
    assert len(rows) > 10
    assert [cell for cell in cells if len(cell.split()) > MAX_CELL_WORDS] == []


@pytest.mark.parametrize(("pattern", "limit"), [("README.md", 150), ("docs/guide/*.md", 250)])
def test_pages_are_short(pattern: str, limit: int) -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob(pattern)}
    assert lengths
    assert {name: length for name, length in lengths.items() if length > limit} == {}


def test_there_is_something_to_check() -> None:
    guide, architecture = (ROOT / "docs" / "guide").glob("*.md"), ROOT / "docs" / "architecture.md"
    assert sum(len(list(commands(page))) for page in guide) > 15
    assert len(FILE.findall(prose(architecture))) > 20
    assert len(list(shown_errors())) > 8
    assert len(CLASS.findall(prose(architecture))) > 20


SHOWN = re.compile(r"^ *\$ chairlift (.*)\n *error: (.*)$", re.MULTILINE)
REQUEST_ID = re.compile(r"\b[0-9a-f]{32}\b")


def shown_errors() -> Iterator[tuple[str, str]]:
    """The calls that documents show with an error, and its message."""
    for document in sorted((ROOT / "docs").rglob("*.md")):
        yield from SHOWN.findall(document.read_text(encoding="utf-8"))


@needs_native
@pytest.mark.parametrize(("call", "message"), list(shown_errors()))
def test_errors_are_printed_as_shown(
    call: str, message: str, smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of requests are random, and the sizes of blocks are those of native kernels."""
    monkeypatch.chdir(tmp_path)
    if "truncated.gguf" in call:
        with smollm2_gguf.open("rb") as whole:
            Path("truncated.gguf").write_bytes(whole.read(50_000_000))
    words = shlex.split(call)
    if words[0] == "serve" and "--port" not in words:
        words += ["--port", "0"]  # Port 8000 may be in use.
    error = str(invoke(words).exception)
    assert REQUEST_ID.sub("ID", error) == REQUEST_ID.sub("ID", message)


GUIDE = Path(__file__).parents[1] / "docs" / "guide" / "open-webui.md"


def test_the_guide_has_the_settings_that_the_tool_runs_with() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    shown = {name: value.strip("'") for name, value in re.findall(r"^export ([A-Z_]+)=(.*)$", text, re.MULTILINE)}
    del shown["OPENAI_API_BASE_URL"]
    assert shown == SETTINGS
    assert {name for name in FOR_ONE_RUN if f"`{name}=" in text} == {"OFFLINE_MODE", "WEBUI_AUTH"}
