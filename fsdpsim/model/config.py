"""The architecture of a decoder-only transformer, read in Hugging Face's spelling.

Every family writes the same few facts under its own names; :data:`NAMES` lists them all, so that
a ``config.json`` of Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, GPT-2 or MPT can be used as
it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, StrictBool, ValidationError, model_validator

from fsdpsim.faults import Fault, FaultsError, did_you_mean, expected, not_allowed
from fsdpsim.units import Count, CountOrZero, Few

#: Field of :class:`ModelConfig` -> the keys it is looked for under, in order; a dot enters a table.
NAMES: dict[str, tuple[str, ...]] = {
    "model_type": ("model_type",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "n_kv_heads", "attn_config.kv_n_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "d_ff"),
    "expansion_ratio": ("expansion_ratio",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "hidden_act": ("hidden_act", "activation_function"),
    "attention_bias": ("attention_bias", "qkv_bias"),
    "mlp_bias": ("mlp_bias",),
    "no_bias": ("no_bias",),
    "alibi": ("alibi", "attn_config.alibi"),
    "learned_pos_emb": ("learned_pos_emb",),
    "num_local_experts": ("num_local_experts", "num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok",),
}

_LLAMA = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "learned_pos_emb": False,
}
_GPT2 = {
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "norm_bias": True,
    "learned_pos_emb": True,
    "expansion_ratio": 4,
}

#: ``model_type`` -> what its files leave out. Source: the defaults of transformers' configuration
#: classes (``LlamaConfig``, ``Qwen2Config``, ``Qwen3Config``, ``GPT2Config``, ...) and, for MPT, of
#: llm-foundry's ``MPTConfig``.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA | {"attention_bias": True},
    "qwen3": _LLAMA | {"qk_norm": True, "head_dim": 128},
    "mixtral": _LLAMA,
    "qwen3_moe": _LLAMA | {"qk_norm": True, "head_dim": 128},
    "gpt2": _GPT2,
    "mpt": _GPT2,
}

MOE_FAMILIES = ("mixtral", "qwen3_moe")
FUSED_QKV_FAMILIES = ("gpt2", "mpt")

#: No config.json comes near; what is cut off here is no JSON.
MAX_CONFIG_BYTES = 10_000_000

_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


class ModelConfig(BaseModel):
    """One architecture, with every default filled in. Sizes are counts of elements.

    ``model_validate`` takes a whole ``config.json`` in any family's spelling; keys that say nothing
    of shapes are ignored. Sliding-window attention and shared experts are not modelled.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: str
    hidden_size: Count
    num_hidden_layers: Few
    num_attention_heads: Count
    num_key_value_heads: Count
    """Heads of keys and values; fewer than query heads is grouped-query attention."""
    head_dim: Count
    intermediate_size: Count
    """Width of the MLP; of each expert when there are experts."""
    vocab_size: Count
    max_position_embeddings: CountOrZero = 0
    """Rows of the learned position table; without such a table it changes nothing."""
    tie_word_embeddings: StrictBool
    hidden_act: str
    attention_bias: StrictBool
    """Biases on the q, k and v projections and, but for Qwen2, on the output projection."""
    mlp_bias: StrictBool
    norm_bias: StrictBool
    learned_pos_emb: StrictBool
    alibi: StrictBool = False
    qk_norm: StrictBool = False
    """RMSNorm over each head of q and k (Qwen3)."""
    num_local_experts: CountOrZero = 0
    """Experts per layer; 0 is a dense MLP."""
    num_experts_per_tok: CountOrZero = 0

    @model_validator(mode="before")
    @classmethod
    def _from_any_spelling(cls, data: object) -> object:
        return _complete(_canonical(data)) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads = {self.num_key_value_heads} does not divide "
                f"num_attention_heads = {self.num_attention_heads}"
            )
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok = {self.num_experts_per_tok} is more than "
                f"num_local_experts = {self.num_local_experts}"
            )
        return self

    @property
    def q_size(self) -> int:
        """Width of the queries and of the attention output: heads times head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def fused_qkv(self) -> bool:
        """Whether q, k and v come from one projection (GPT-2, MPT)."""
        return self.model_type in FUSED_QKV_FAMILIES

    @property
    def is_moe(self) -> bool:
        """Whether the MLP is a choice of experts."""
        return self.num_local_experts > 0


def read_model_config(table: Mapping[str, Any], base: Path = Path()) -> ModelConfig:
    """Read the ``[model]`` table of a scenario.

    ``hf_config`` in it names a ``config.json``, relative to ``base`` (the scenario's directory);
    keys written beside it override the file's, whichever spelling either uses. Raises
    ``FaultsError`` (a ``ValueError``) that names every unknown key of the table, or what the table
    and its file lack.
    """
    inline = {key: value for key, value in table.items() if key != "hf_config"}
    _refuse_unknown(inline)
    from_file = _read_json(table["hf_config"], base) if "hf_config" in table else {}
    written = _canonical(inline)
    try:
        return ModelConfig.model_validate(_canonical(from_file) | written)
    except ValidationError as error:
        source = f" (in {table['hf_config']})" if from_file else ""
        raise FaultsError(*_faults(error, written, source)) from None


def _faults(error: ValidationError, written: Mapping[str, Any], source: str) -> Iterator[Fault]:
    for fault in error.errors():
        if fault["type"] == "missing":
            continue  # it would follow from what is at fault itself: see _complete
        key = ".".join(map(str, fault["loc"]))
        if fault["type"] == "value_error":
            yield Fault(key, str(fault["ctx"]["error"]) + source)
        else:
            wanted = expected(fault["type"], fault.get("ctx", {}), fault["msg"])
            found_in = "" if fault["loc"][0] in written else source
            yield Fault(key, not_allowed(fault["input"], wanted) + found_in)


def _read_json(name: object, base: Path) -> dict[str, Any]:
    if not isinstance(name, str):
        raise FaultsError(Fault("hf_config", not_allowed(name, "the path of a config.json")))
    path = base / name
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(MAX_CONFIG_BYTES))
    except OSError as error:
        raise FaultsError(Fault("hf_config", f"cannot read {path}: {error.strerror}")) from None
    except (ValueError, RecursionError) as error:
        raise FaultsError(Fault("hf_config", f"{path} is not JSON: {error}")) from None
    if not isinstance(data, dict):
        what = f"{path} holds {type(data).__name__}, not an object"
        raise FaultsError(Fault("hf_config", what))
    return data


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _canonical(data: Mapping[str, Any]) -> dict[str, Any]:
    """The known facts of ``data`` under the field names of :class:`ModelConfig`."""
    flat = dict(_flatten(data))
    fields = dict.fromkeys([*NAMES, *ModelConfig.model_fields])
    found = {
        name: next((flat[k] for k in NAMES.get(name, (name,)) if flat.get(k) is not None), None)
        for name in fields
    }
    return {name: value for name, value in found.items() if value is not None}


def _complete(known: dict[str, Any]) -> dict[str, Any]:
    """Fill in the family's defaults; raise ``ValueError`` that lists all that is missing."""
    family = known.get("model_type")
    if family is not None and family not in tuple(FAMILIES):
        raise ValueError(f"model_type {family!r} is not modelled; known: {', '.join(FAMILIES)}")
    facts = FAMILIES.get(family or "", {}) | known
    _derive(facts)
    missing = [name for name in _needed(facts) if name not in facts]
    if missing:
        looked = "; ".join(f"{name} (looked for {_spellings(name)})" for name in missing)
        raise ValueError(f"the model config lacks {looked}")
    return facts


def _derive(facts: dict[str, Any]) -> None:
    width, heads = facts.get("hidden_size"), facts.get("num_attention_heads")
    if "no_bias" in facts:
        facts |= dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias"), not facts["no_bias"])
    if facts.get("alibi"):
        facts["learned_pos_emb"] = False
    if "moe_intermediate_size" in facts and facts.get("model_type") in MOE_FAMILIES:
        facts["intermediate_size"] = facts["moe_intermediate_size"]
    if type(width) is int and "expansion_ratio" in facts:
        facts.setdefault("intermediate_size", facts["expansion_ratio"] * width)
    if type(width) is int and width > 0 and type(heads) is int and "head_dim" not in facts:
        facts["head_dim"] = _even_head_dim(width, heads)
    if heads is not None:
        facts.setdefault("num_key_value_heads", heads)
    if facts.get("model_type") not in MOE_FAMILIES:
        facts["num_local_experts"] = facts["num_experts_per_tok"] = 0


def _even_head_dim(width: int, heads: int) -> int:
    if heads > 0 and width % heads:
        raise ValueError(f"num_attention_heads = {heads} does not divide hidden_size = {width}")
    return width // heads if heads > 0 else 1


def _needed(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "model_type"
    yield from _REQUIRED
    if facts.get("model_type") in MOE_FAMILIES:
        yield from ("num_local_experts", "num_experts_per_tok")
    if facts.get("learned_pos_emb"):
        yield "max_position_embeddings"


def _spellings(name: str) -> str:
    return ", ".join(NAMES.get(name, (name,)))


def _refuse_unknown(inline: Mapping[str, Any]) -> None:
    known = {key for keys in NAMES.values() for key in keys} | set(ModelConfig.model_fields)
    unknown = [key for key, _ in _flatten(inline) if key not in known]
    if unknown:
        raise FaultsError(*(Fault(key, _unknown(key, sorted(known))) for key in unknown))


def _unknown(key: str, known: list[str]) -> str:
    hint = did_you_mean(key, known, f"known are hf_config, {', '.join(known)}")
    return f"unknown key; {hint}"
