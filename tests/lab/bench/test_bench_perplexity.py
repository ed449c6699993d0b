"""`bench perplexity` on tiny random models compared with transformers, its arithmetic, and the command."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.lab.bench.benchmark_result import BenchmarkResult
from chairlift.lab.bench.perplexity import (
    PerplexityOptions,
    PerplexityTally,
    Scorer,
    read_text,
    run_perplexity,
    score,
    split_windows,
)
from chairlift.loading.text.tokenizer import Tokenizer
from support.command_runner import invoke

TinyModel = Callable[..., Path]
TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind. " * 3


@pytest.fixture(scope="module")
def letters_model(tiny_model_dir: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Creates a tiny random model with a tokenizer of one token for each letter. With `bos`, token 1 begins a text."""

    def make(*, bos: bool = False, **overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp("letters")
        shutil.copytree(tiny_model_dir("llama", **overrides), folder, dirs_exist_ok=True)
        _letters(bos).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
        return folder

    return make


def _letters(bos: bool) -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(32 + i): 3 + i for i in range(95)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT)
    return path


def config(model: Path, kernels: str = "torch", **changes: Any) -> EngineConfig:
    return EngineConfig(model=str(model), kernels=kernels, num_threads=1, **changes)


def transformers_nll(model: Path, windows: list[list[int]]) -> list[torch.Tensor]:
    import transformers

    twin = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    losses = []
    with torch.inference_mode():
        for window in windows:
            logits = twin(torch.tensor([window])).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="none"))
    return losses


@pytest.mark.parametrize(("arch", "num_batched"), [("llama", 512), ("llama", 7), ("gemma3", 512)])
def test_likelihoods_are_those_of_transformers(tiny_model_dir: TinyModel, arch: str, num_batched: int) -> None:
    model = tiny_model_dir(arch)
    windows = torch.randint(3, 256, (3, 40), generator=torch.Generator().manual_seed(5)).tolist()
    windows[2] = windows[2][:2]
    engine = config(model, max_num_batched_tokens=num_batched, max_num_seqs=1, skip_tokenizer_init=True)
    tally = score(Scorer(engine, 40), None, windows)
    expected = torch.cat(transformers_nll(model, windows)).double()
    assert tally.num_tokens == len(expected) == 79
    torch.testing.assert_close(torch.cat(tally.nll), expected, rtol=1e-4, atol=1e-4)
    assert tally.perplexity == pytest.approx(math.exp(float(expected.mean())), rel=1e-4)


def test_windows_do_not_overlap_and_the_last_has_the_rest(text: Path) -> None:
    tokenizer = Tokenizer(_letters(bos=False), special_tokens={"bos_token": "<s>"})
    windows = split_windows(tokenizer, TEXT, PerplexityOptions(text=text, window=50))
    assert [len(window) for window in windows] == [50, 50, 50, 50, 16]
    assert [token for window in windows for token in window] == tokenizer.encode(TEXT)
    assert split_windows(tokenizer, TEXT, PerplexityOptions(text=text, window=50, num_windows=2)) == windows[:2]


def test_every_window_begins_with_the_token_that_the_tokenizer_adds(text: Path) -> None:
    tokenizer = Tokenizer(_letters(bos=True), special_tokens={"bos_token": "<s>"})
    windows = split_windows(tokenizer, "abcde", PerplexityOptions(text=text, window=3))
    assert [window[0] for window in windows] == [1, 1, 1]
    assert [len(window) for window in windows] == [3, 3, 2]


def test_a_text_without_a_token_to_predict_is_rejected(text: Path) -> None:
    tokenizer = Tokenizer(_letters(bos=False))
    with pytest.raises(ConfigError, match="has 1 token, which is too short to predict any"):
        split_windows(tokenizer, "a", PerplexityOptions(text=text))


def test_a_tally_compares_with_a_reference() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]).log()
    ours = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]]).log()
    tally = PerplexityTally()
    tally.add(torch.tensor([0, 2]), ours, reference)
    ours_expected, reference_expected = (1 / (0.25 * 0.5)) ** 0.5, (1 / (0.5 * 0.6)) ** 0.5
    first, second = math.log(2), math.log(0.6 / 0.5)
    divergence = 0.5 * math.log(2) + 0.25 * math.log(0.5) + 0.2 * math.log(0.2 / 0.3) + 0.6 * math.log(0.6 / 0.5)
    assert tally.values() == pytest.approx(
        {
            "perplexity": ours_expected,
            "num_tokens": 2,
            "reference_perplexity": reference_expected,
            "change": ours_expected / reference_expected - 1,
            "change_stderr": abs(first - second) / 2,
            "greedy_agreement": 0.5,
            "mean_kl": divergence / 2,
        }
    )


def values(result: BenchmarkResult) -> dict[str, float]:
    ((run,),) = result.runs.values()
    return {key: value for key, value in run.items() if value is not None}


def test_float32_agrees_with_itself(letters_model: Callable[..., Path], text: Path) -> None:
    result = run_perplexity(config(letters_model()), PerplexityOptions(text=text, window=100, against="float32"))
    found = values(result)
    assert found["num_tokens"] == len(TEXT) - 3
    assert found["greedy_agreement"] == 1.0
    assert found["mean_kl"] == pytest.approx(0.0, abs=1e-6)
    assert found["reference_perplexity"] == pytest.approx(found["perplexity"])


def test_bfloat16_differs_from_float32(letters_model: Callable[..., Path], text: Path) -> None:
    options = PerplexityOptions(text=text, window=100, num_windows=1, against="float32")
    result = run_perplexity(config(letters_model(), dtype="bfloat16"), options)
    assert 1e-7 < values(result)["mean_kl"] < 1e-1
    assert values(result)["change"] != 0.0


def test_the_default_kernels_are_near_float32(letters_model: Callable[..., Path], text: Path) -> None:
    options = PerplexityOptions(text=text, window=100, against="float32")
    result = run_perplexity(config(letters_model(), kernels="auto"), options)
    assert values(result)["mean_kl"] < 1e-2
    assert values(result)["greedy_agreement"] > 0.9


def test_references_and_windows_that_do_not_fit_are_rejected(letters_model: Callable[..., Path], text: Path) -> None:
    other = letters_model(vocab_size=300)
    with pytest.raises(ConfigError, match="its vocabulary has 300 tokens and the model's 256"):
        run_perplexity(config(letters_model()), PerplexityOptions(text=text, against=str(other)))
    with pytest.raises(ConfigError, match=r"a window of 216 tokens does not fit: .*64"):
        run_perplexity(config(letters_model(), max_model_len=64), PerplexityOptions(text=text, window=256))


@pytest.mark.parametrize(("name", "value"), [("window", 1), ("num_windows", 0)])
def test_errors_name_the_option(name: str, value: int) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"{name} must be at least"):
        PerplexityOptions(text=Path("a.txt"), **changes)


def test_unreadable_texts_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text=.*none\.txt: cannot be read: No such file or directory$"):
        read_text(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin\.txt: cannot be read as UTF-8"):
        read_text(tmp_path / "latin.txt")


def printed(result: BenchmarkResult) -> tuple[str, dict[str, Any]]:
    with redirect_stdout(io.StringIO()) as out:
        result.print()
        result.print(True)
    *table, line = out.getvalue().splitlines()
    return "\n".join(table), json.loads(line)


def test_the_report_has_a_table_and_one_json_line(letters_model: Callable[..., Path], text: Path) -> None:
    result = run_perplexity(config(letters_model()), PerplexityOptions(text=text, window=100, against="float32"))
    table, record = printed(result)
    assert "fox.txt, 213 tokens predicted in 3 windows of 100" in " ".join(table.split())
    assert f"{values(result)['perplexity']:.4f}" in table
    assert "100.00" in table
    assert "reference: float32" in table
    assert record["benchmark"] == "perplexity"
    (system,) = record["systems"].values()
    assert system["runs"] == [values(result)]


def test_the_command_prints_one_json_line(letters_model: Callable[..., Path], text: Path) -> None:
    arguments = ["bench", "perplexity", "--model", str(letters_model()), "--text", str(text), "--num-threads", "1"]
    done = invoke([*arguments, "--num-windows", "1", "--window", "20", "--json"])
    assert done.exit_code == 0, done.output
    (system,) = json.loads(done.stdout)["systems"].values()
    (run,) = system["runs"]
    assert run["num_tokens"] == 19
    assert "mean_kl" not in run
