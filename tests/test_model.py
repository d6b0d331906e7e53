from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpsim.model import (
    ModelConfig,
    active_parameters,
    flops_per_token,
    form_units,
    matmul_parameters,
    modules,
    parameters,
    read_model_config,
)

MODELS = Path(__file__).parent.parent / "scenarios" / "models"

# Totals of the published checkpoints (safetensors metadata on the Hugging Face hub; for MPT, what
# llm-foundry prints at 2048 positions). GPT-175B and 1T have only round published sizes.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_34b": 33_743_970_304,
    "llama2_70b": 68_976_648_192,
    "llama3.2_1b": 1_235_814_400,
    "llama3_1.8b": 1_884_391_424,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "mpt_125m": 125_311_488,
    "mpt_350m": 355_985_408,
    "mpt_760m": 760_470_528,
    "mpt_1b": 1_315_950_592,
    "mpt_3b": 2_651_837_440,
    "mpt_7b": 6_658_859_008,
    "mpt_13b": 12_853_954_560,
    "mpt_30b": 29_975_214_080,
    "mpt_70b": 64_862_437_376,
    "qwen2_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "tinyllama_1.1b": 1_100_048_384,
}


def read(name: str, **inline: object) -> ModelConfig:
    return read_model_config({"hf_config": f"{name}.json", **inline}, MODELS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_total_the_published_count(name: str) -> None:
    assert sum(p.numel for p in parameters(read(name))) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "billions"), [("gpt_175b", 175), ("gpt_1t", 1008)])
def test_large_gpts_have_their_published_size(name: str, billions: int) -> None:
    assert sum(p.numel for p in parameters(read(name))) == pytest.approx(billions * 1e9, rel=2e-3)


def test_every_model_file_is_read() -> None:
    assert {path.stem for path in MODELS.glob("*.json")} == {*PUBLISHED, "gpt_175b", "gpt_1t"}


def test_names_and_shapes_are_those_of_named_parameters() -> None:
    llama = {p.name: p.shape for p in parameters(read("llama3_8b"))}
    assert llama["model.embed_tokens.weight"] == (128256, 4096)
    assert llama["model.layers.31.self_attn.k_proj.weight"] == (1024, 4096)
    assert llama["model.layers.0.mlp.down_proj.weight"] == (4096, 14336)
    assert llama["model.layers.0.post_attention_layernorm.weight"] == (4096,)
    assert llama["lm_head.weight"] == (128256, 4096)
    assert len(llama) == 32 * 9 + 3
    qwen = {p.name: p.shape for p in parameters(read("qwen3_32b"))}
    assert qwen["model.layers.0.self_attn.q_norm.weight"] == (128,)
    assert qwen["model.layers.0.self_attn.q_proj.weight"] == (8192, 5120)
    gpt2 = {p.name: p.shape for p in parameters(read("gpt2"))}
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == (768, 2304)
    assert gpt2["transformer.wpe.weight"] == (1024, 768)
    assert "lm_head.weight" not in gpt2
    mpt = {p.name: p.shape for p in parameters(read("mpt_1b"))}
    assert mpt["transformer.blocks.23.attn.Wqkv.bias"] == (6144,)
    mixtral = {p.name: p.shape for p in parameters(read("mixtral_8x7b"))}
    assert mixtral["model.layers.0.block_sparse_moe.experts.7.w2.weight"] == (4096, 14336)


def test_qwen2_has_biases_on_qkv_only() -> None:
    biases = {p.name.split(".")[-2] for p in parameters(read("qwen2_7b")) if "bias" in p.name}
    assert biases == {"q_proj", "k_proj", "v_proj"}


def test_alibi_replaces_the_position_table_and_no_bias_removes_every_bias() -> None:
    config = read("mpt_7b", attn_config={"alibi": True}, no_bias=True)
    names = [p.name for p in parameters(config)]
    assert not any("wpe" in name or name.endswith("bias") for name in names)


def test_position_table_follows_max_seq_len() -> None:
    short, long = (read("mpt_7b", max_seq_len=n) for n in (2048, 8192))
    grown = sum(p.numel for p in parameters(long)) - sum(p.numel for p in parameters(short))
    assert grown == (8192 - 2048) * 4096


def test_inline_keys_override_the_file_in_any_spelling() -> None:
    assert read("llama3_8b", n_layer=2).num_hidden_layers == 2
    assert read("llama3_8b", n_layers=2) == read("llama3_8b", num_hidden_layers=2)
    assert read("gpt2", tie_word_embeddings=False).tie_word_embeddings is False


def test_whole_config_json_is_accepted() -> None:
    data = json.loads((MODELS / "llama3_8b.json").read_text())
    extra = data | {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"factor": 8.0}}
    assert ModelConfig.model_validate(extra) == ModelConfig.model_validate(data)


def test_expert_width_of_qwen3_moe_is_moe_intermediate_size() -> None:
    config = read("qwen3_30b_a3b")
    assert (config.intermediate_size, config.num_local_experts) == (768, 128)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "lacks model_type"),
        (
            {"model_type": "llama", "hidden_size": 64},
            r"lacks num_hidden_layers \(looked for num_hidden_layers, n_layer, n_layers\); "
            r"num_attention_heads .*; intermediate_size .*; vocab_size",
        ),
        ({"hidden_sise": 64}, "hidden_sise: unknown key; did you mean hidden_size"),
        ({"model_type": "bert"}, "'bert' is not modelled; known: llama"),
        ({"hf_config": "absent.json"}, "cannot read .*absent.json"),
        ({"hf_config": "gpt2.json", "n_head": 0}, "num_attention_heads: 0 .* at least 1"),
        ({"hf_config": "gpt2.json", "n_head": 7}, "= 7 does not divide hidden_size = 768"),
        ({"hf_config": "llama3_8b.json", "num_key_value_heads": 5}, "does not divide"),
        ({"hf_config": "mixtral_8x7b.json", "num_experts_per_tok": 9}, "more than"),
    ],
)
def test_faults_are_named(table: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(table, MODELS)


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(ValueError, match=r"list\.json holds list"):
        read_model_config({"hf_config": "list.json"}, tmp_path)
    with pytest.raises(ValueError, match=r"torn\.json is not JSON"):
        read_model_config({"hf_config": "torn.json"}, tmp_path)


def test_flops_per_token_by_hand() -> None:
    config = read("llama3_8b")
    assert flops_per_token(config, 8192) == 6 * 8_030_261_248 + 12 * 32 * 4096 * 8192
    without = flops_per_token(config, 8192, count_embedding=False)
    assert without == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192


def test_mixture_counts_the_chosen_experts() -> None:
    assert active_parameters(read("mixtral_8x7b")) == 12_879_925_248
    expert = 3 * 4096 * 14336
    config = read("mixtral_8x7b")
    every, chosen = (matmul_parameters(config, active=active) for active in (False, True))
    assert every - chosen == 32 * 6 * expert


def test_matmul_parameters_leave_out_norms_biases_and_lookups() -> None:
    assert matmul_parameters(read("llama3_8b")) == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert matmul_parameters(read("gpt2")) == 12 * 12 * 768**2 + 50257 * 768


TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2", "mpt"]

configs = st.builds(
    lambda family, layers, tied: ModelConfig.model_validate(
        {
            **TINY,
            "model_type": family,
            "num_hidden_layers": layers,
            "tie_word_embeddings": tied,
        }
    ),
    st.sampled_from(FAMILIES),
    st.integers(1, 5),
    st.booleans(),
)
unit_specs = st.sampled_from(["model", "block", "sublayer", "linear"]) | st.builds(
    lambda k: {"blocks": k}, st.just(1)
)


@given(configs, unit_specs, st.booleans(), st.booleans())
def test_units_partition_the_parameters(
    config: ModelConfig, unit: str, wrap_embedding: bool, wrap_head: bool
) -> None:
    wrapping = form_units(config, unit, wrap_embedding=wrap_embedding, wrap_head=wrap_head)
    names = [p.name for u in wrapping.units for p in u.params]
    assert sorted(names) == sorted(p.name for p in parameters(config))
    assert [u.is_root for u in wrapping.units] == [False] * (len(wrapping.units) - 1) + [True]
    assert len({u.name for u in wrapping.units}) == len(wrapping.units)
    owned = {p.name: u.name for u in wrapping.units for p in u.params}
    for module in modules(config):
        assert all(owned[p.name] == wrapping.unit_of[module.name] for p in module.params)


def unit_names(name: str, unit: object, **options: bool) -> list[str]:
    return [u.name for u in form_units(read(name), unit, **options).units]  # type: ignore[arg-type]


def test_unit_sizes() -> None:
    assert unit_names("llama3_8b", "model") == ["root"]
    assert unit_names("llama3_8b", "block")[:2] == ["layers.0", "layers.1"]
    groups = unit_names("llama3_8b", {"blocks": 5})
    assert groups[0] == "layers.0-4"
    assert groups[-2:] == ["layers.30-31", "root"]
    assert unit_names("gpt2", "sublayer")[:3] == [
        "layers.0.attention",
        "layers.0.mlp",
        "layers.1.attention",
    ]
    linears = unit_names("mixtral_8x7b", "linear")
    assert linears[3:7] == [
        "layers.0.self_attn.o_proj",
        "layers.0.block_sparse_moe.gate",
        "layers.0.block_sparse_moe.experts",
        "layers.1.self_attn.q_proj",
    ]
    assert linears[-2:] == ["lm_head", "root"]


def test_numels_of_llama3_8b_units() -> None:
    units = {u.name: u.numel for u in form_units(read("llama3_8b"), "sublayer").units}
    assert units["layers.0.attention"] + units["layers.0.mlp"] == 218_112_000
    assert units["root"] == 2 * 128256 * 4096 + 4096


def test_embedding_and_head_as_units_of_their_own() -> None:
    names = unit_names("llama3_8b", "block", wrap_embedding=True, wrap_head=True)
    assert names[0] == "embed"
    assert names[-2:] == ["head", "root"]
    tied = form_units(read("llama3.2_1b"), "block", wrap_embedding=True, wrap_head=True)
    assert tied.units[-1].params[0].name == "model.embed_tokens.weight"
    assert tied.unit_of["lm_head"] == "root"


def test_patterns_stay_within_a_component_and_inner_units_take_their_parameters() -> None:
    units = {u.name: u for u in form_units(read("mpt_1b"), ["*.blocks.*", "*.blocks.*.ffn"]).units}
    assert len(units) == 24 * 2 + 1
    assert {p.name.split(".")[3] for p in units["layers.0.ffn"].params} == {"ffn"}
    assert {p.name.split(".")[3] for p in units["layers.0"].params} == {"norm_1", "attn", "norm_2"}


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        ("layer", '"layer" is not a unit size; use "model", "block"'),
        ({"blocks": 0}, "not a unit size"),
        ({"layers": 2}, "not a unit size"),
        ({"blocks": 33}, "more than the model's 32 blocks"),
        (["model.layer.*"], r'"model.layer.\*" matches no module'),
    ],
)
def test_units_that_do_not_exist(unit: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form_units(read("llama3_8b"), unit)  # type: ignore[arg-type]
