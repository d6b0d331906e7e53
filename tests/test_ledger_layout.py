"""Which rank holds what: worked examples, recorded layouts, and laws over random units."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import read_recording

from fsdpsim.ledger.layout import Held, flat_layout, per_parameter_holding
from fsdpsim.sharding import first_shard, flat_parameter, per_parameter
from fsdpsim.workload import Param

LINEAR = (Param(name="weight", shape=(4, 3)), Param(name="bias", shape=(3,)))


def tail_padded(params: tuple[Param, ...], factor: int) -> int:
    layout = flat_layout(params, factor, compute_dtype="float32", use_orig_params=False)
    return layout.size.padded - sum(p.numel for p in params)


# ---- examples


def test_a_linear_layer_over_16_ranks() -> None:
    """PyTorch FSDP, figure 3: 15 elements pad 1, and the last rank holds the padding."""
    layout = flat_layout(LINEAR, 16, compute_dtype="float32", use_orig_params=False)
    assert tail_padded(LINEAR, 16) == 1
    holdings = [layout.holding(rank) for rank in range(16)]
    assert [h.held for h in holdings[:12]] == [
        (Held(param="weight", start=i, stop=i + 1),) for i in range(12)
    ]
    assert holdings[14].held == (Held(param="bias", start=2, stop=3),)
    assert (holdings[15].held, holdings[15].padding) == ((), 1)


def test_the_same_layer_by_rows() -> None:
    """FSDP2: 4 rows and 3 elements over 16 ranks, so 13 ranks hold nothing of the bias."""
    holdings = [per_parameter_holding(LINEAR, 16, rank) for rank in range(16)]
    assert holdings[3].held == (Held(param="weight", start=9, stop=12),)
    assert [h.padding for h in holdings] == [0, 0, 0, 1] + [4] * 12


def test_a_block_of_314_million_over_1000_ranks() -> None:
    """12 x 5120^2 = 314,572,800 leaves 800 over 1000 ranks, so it pads 200; over 64 it pads 0."""
    block = (Param(name="block", shape=(12 * 5120**2,)),)
    assert tail_padded(block, 1000) == 200
    assert tail_padded(block, 64) == 0


# ---- recordings of torch 2.13


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fsdp1_path" in metafunc.fixturenames:
        directory = Path(metafunc.config.getoption("--golden-dir"))
        paths = sorted(directory.glob("fsdp1__*.json"))
        metafunc.parametrize("fsdp1_path", paths, ids=lambda path: path.stem)


def test_flat_parameters_are_laid_out_as_recorded(fsdp1_path: Path) -> None:
    recording = read_recording(fsdp1_path)
    settings = recording["settings"]
    factor = settings["mesh"][1] if settings["mesh"] else recording["world_size"]
    if settings["sharding_strategy"] == "NO_SHARD":
        factor = 1
    for unit in (unit for unit in recording["units"] if unit["params"]):
        params = tuple(
            Param(name=p["name"], shape=tuple(p["shape"]), dtype=p["dtype"]) for p in unit["params"]
        )
        layout = flat_layout(
            params,
            factor,
            compute_dtype=settings["param_dtype"] or params[0].dtype,
            use_orig_params=settings["use_orig_params"],
        )
        recorded = [tuple(piece) for piece in unit["layout"]]
        pieces = [(p.numel, p.param is None) for p in layout.pieces]
        # Without use_orig_params torch pads each rank's chunk, not the flat parameter.
        tail = unit["padded_numel"] - unit["flat_numel"]
        assert pieces == recorded + ([(tail, True)] if tail else [])
        assert layout.size.padded == unit["padded_numel"]


# ---- laws

PARAMS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=5).map(
    lambda shapes: tuple(Param(name=f"p{i}", shape=tuple(s)) for i, s in enumerate(shapes))
)
FACTORS = st.integers(1, 20)


def covers(holdings: list[tuple[Held, ...]], params: tuple[Param, ...]) -> bool:
    """Every element of every parameter is on exactly one rank, ranks in order."""
    ends = dict.fromkeys((p.name for p in params), 0)
    for held in (h for holding in holdings for h in holding):
        if held.start != ends[held.param] or held.stop <= held.start:
            return False
        ends[held.param] = held.stop
    return ends == {p.name: p.numel for p in params}


@given(params=PARAMS, factor=FACTORS, aligned=st.booleans())
def test_fsdp1_puts_each_element_on_one_rank(
    params: tuple[Param, ...], factor: int, aligned: bool
) -> None:
    layout = flat_layout(params, factor, compute_dtype="bfloat16", use_orig_params=aligned)
    size = flat_parameter(params, factor, compute_dtype="bfloat16", use_orig_params=aligned)
    holdings = [layout.holding(rank) for rank in range(factor)]
    assert covers([h.held for h in holdings], params)
    assert all(sum(p.numel for p in h.held) + h.padding == size.shard for h in holdings)
    assert sum(piece.numel for piece in layout.pieces) == size.padded


@given(params=PARAMS, factor=FACTORS)
def test_the_optimizer_of_fsdp1_sees_what_the_first_rank_has(
    params: tuple[Param, ...], factor: int
) -> None:
    layout = flat_layout(params, factor, compute_dtype="bfloat16", use_orig_params=True)
    pieces = first_shard(params, layout.size, "bfloat16")
    assert pieces == tuple(held.numel for held in layout.holding(0).held)


@given(params=PARAMS, factor=FACTORS)
def test_fsdp2_puts_each_row_on_one_rank(params: tuple[Param, ...], factor: int) -> None:
    size = per_parameter(params, factor)
    holdings = [per_parameter_holding(params, factor, rank) for rank in range(factor)]
    assert covers([h.held for h in holdings], params)
    assert all(sum(p.numel for p in h.held) + h.padding == size.shard for h in holdings)
    rows = {p.name: p.numel // p.shape[0] for p in params}
    assert all(p.start % rows[p.param] == 0 for h in holdings for p in h.held)
