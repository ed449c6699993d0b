"""The predictors of Qwen3.5 and Qwen3-Next give the logits of a plain reference, in whole prompts and in chunks, from
both formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_gguf_parity import write_gguf
from test_models_parity import prompts
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from chairlift.errors import ConfigError
from chairlift.loading.resolve import resolve_model
from chairlift.models.decoder import DecoderModel, build_model
from support.native import needs_native
from support.packed_steps import Tables, pack
from support.recurrences import state_step

TOLERANCE = 2e-3
KINDS = ("folder", "gguf")
LAYERS = {
    "qwen3_5_text": Qwen3_5DecoderLayer,
    "qwen3_5_moe_text": Qwen3_5MoeDecoderLayer,
    "qwen3_next": Qwen3NextDecoderLayer,
}
"""`model_type` -> the layer of transformers."""


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def load(model: Path, kernels: str) -> DecoderModel:
    files = resolve_model(str(model))
    config = files.config(needs_predictor=True)
    weights = files.weights(config, torch.float32, torch.device("cpu"))
    built = build_model(config, weights, dtype=torch.float32, device="cpu", kernels=kernels)
    assert weights.unused() == []
    built.allocate_kv_cache(num_blocks=64, block_size=8)
    built.allocate_states(8)
    return built


class Reference:
    """Multi-token prediction with the layer of transformers, for one whole sequence."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.weights = load_file(folder / "model.safetensors")
        config, prefix = self.model.config, "mtp.layers.0."
        self.layer = LAYERS[config.model_type](config, config.layer_types.index("full_attention"))
        own = {name.removeprefix(prefix): each for name, each in self.weights.items() if name.startswith(prefix)}
        self.layer.load_state_dict(stack_experts(own))

    def norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, (64,), 1 + self.weights[f"mtp.{name}.weight"], self.model.config.rms_norm_eps)

    def results(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """The results [T - 1, hidden_size] at each token but the last one; `hidden` are those of `predicted` before."""
        embedding = self.model.model.embed_tokens(torch.tensor(tokens[1:]))
        joined = torch.cat((self.norm("pre_fc_norm_embedding", embedding), self.norm("pre_fc_norm_hidden", hidden)), 1)
        x = (joined @ self.weights["mtp.fc.weight"].T)[None]
        positions = torch.arange(len(hidden))[None]
        rotary = self.model.model.rotary_emb(x, positions)
        mask = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        found = self.layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        return self.norm("norm", (found[0] if isinstance(found, tuple) else found)[0])

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """The hidden states after the final norm."""
        states: torch.Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    def logits(self, results: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(results)
        return logits


def stack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with those of all experts in two tensors, as in the layer of transformers."""
    dense = {name: each for name, each in weights.items() if ".experts." not in name}
    count = sum(name.endswith("gate_proj.weight") for name in weights.keys() - dense.keys())
    if not count:
        return dense

    def stacked(part: str) -> torch.Tensor:
        return torch.stack([weights[f"mlp.experts.{number}.{part}_proj.weight"] for number in range(count)])

    both = torch.cat((stacked("gate"), stacked("up")), dim=1)
    return dense | {"mlp.experts.gate_up_proj": both, "mlp.experts.down_proj": stacked("down")}


def predict(
    model: DecoderModel, tables: Tables, work: list[tuple[int, int, int]], sequences: dict[int, list[int]]
) -> list[torch.Tensor]:
    """The results of the predictor for slices (sequence, start, stop) of sequences in one step."""
    step = pack(tables, work)
    counts = [stop - start for _, start, stop in work]
    states = state_step(counts, [s if start else -1 for s, start, _ in work], [s for s, _, _ in work])
    plan = model.plan(step.metadata, states=states)
    tokens = torch.tensor([token for s, start, stop in work for token in sequences[s][start:stop]])
    after = torch.tensor([token for s, start, stop in work for token in sequences[s][start + 1 : stop + 1]])
    hidden = model.final_hidden(model.forward(tokens, step.positions, plan))
    return list(model.predict(after, step.positions, hidden, plan).clone().split(counts))


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize(
    ("kernels", "kind"),
    [("reference", "folder"), ("torch", "folder"), *(pytest.param("native", k, marks=needs_native) for k in KINDS)],
)
def test_logits_are_those_of_the_reference(
    kernels: str, arch: str, kind: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model_dir(arch, mtp_num_hidden_layers=1, **({"mlp_only_layers": []} if arch == "qwen3_next" else {}))
    further = {"block_count": 5, "nextn_predict_layers": 1}
    file = folder if kind == "folder" else write_gguf(folder, arch, tmp_path / "model.gguf", **further)
    model = load(file, kernels)
    reference, sequences = Reference(folder), {number: tokens for number, tokens in prompts().items() if number != 1}
    lengths = {number: len(tokens) - 1 for number, tokens in sequences.items()}
    whole = predict(model, Tables(64, 8), [(number, 0, length) for number, length in lengths.items()], sequences)
    tables = Tables(64, 8, seed=1)
    middle = {number: length // 3 for number, length in lengths.items()}
    parts = [
        predict(model, tables, [(number, 0, middle[number]) for number in sequences], sequences),
        predict(model, tables, [(number, middle[number], lengths[number] - 1) for number in sequences], sequences),
        predict(model, tables, [(number, lengths[number] - 1, lengths[number]) for number in sequences], sequences),
    ]
    for index, (number, tokens) in enumerate(sequences.items()):
        expected = reference.logits(reference.results(tokens, reference.hidden(tokens)[:-1]))
        assert lengths[number] == len(expected)
        for found in (whole[index], torch.cat([part[index] for part in parts])):
            torch.testing.assert_close(model.predicted_logits(found), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_further_token_is_predicted_from_the_result_before_it(tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir("qwen3_5", mtp_num_hidden_layers=1)
    model, reference, tokens = load(folder, "torch"), Reference(folder), prompts()[2]
    tables, length = Tables(64, 8), len(tokens) - 1
    (found,) = predict(model, tables, [(0, 0, length)], {0: tokens})
    step = pack(tables, [(0, length, length + 1)])
    drafted = int(model.predicted_logits(found[-1:]).argmax())
    next_result = model.predict(torch.tensor([drafted]), step.positions, found[-1:].clone(), model.plan(step.metadata))
    hidden = reference.hidden(tokens)[:-1]
    before = reference.results(tokens, hidden)
    expected = reference.results([*tokens, drafted], torch.cat((hidden, before[-1:])))[-1:]
    torch.testing.assert_close(
        model.predicted_logits(next_result), reference.logits(expected), rtol=TOLERANCE, atol=TOLERANCE
    )


def test_a_model_without_a_predictor_is_rejected_if_one_is_needed(tiny_model_dir: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"method=mtp needs a layer .* has none: use method=ngram, or a draft model"):
        resolve_model(str(tiny_model_dir("qwen3_5"))).config(needs_predictor=True)


def test_without_need_its_tensors_are_skipped(tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir("qwen3_5", mtp_num_hidden_layers=1)
    files: Any = resolve_model(str(folder))
    config = files.config()
    assert config.predictor is None
    weights = files.weights(config, torch.float32, torch.device("cpu"))
    build_model(config, weights, dtype=torch.float32, device="cpu", kernels="torch")
    assert weights.unused() == []
    assert [note for note in weights.notes() if "tensors mtp.*" in note]
