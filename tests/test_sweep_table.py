"""The [sweep] table: lists, ranges, zipped keys, constraints, and what it says of a mistake."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpsim.resolved import as_toml, resolved
from fsdpsim.scenario import Scenario, ScenarioError, load
from fsdpsim.scenario.expressions import parse_expression
from fsdpsim.scenario.keys import join_key, set_key, split_key
from fsdpsim.scenario.sweep_table import MAX_RANGE, Range
from fsdpsim.sweeps import Grid

WORKLOAD = {"units": 4, "forward": 2.0, "backward": 4.0, "all_gather": 1.5, "reduce_scatter": 1.5}
TABLES: dict[str, Any] = {
    "workload": WORKLOAD,
    "fsdp": {"runtime": "fsdp2"},
    "hardware": {"nodes": 2, "gpus_per_node": 4},
}


def scenario(sweep: Any, **tables: Any) -> Scenario:
    return load({**TABLES, **tables, "sweep": sweep})


def fault(sweep: Any, **tables: Any) -> str:
    with pytest.raises(ScenarioError) as error:
        scenario(sweep, **tables)
    return str(error.value)


def settings_of(sweep: Any, **tables: Any) -> list[dict[str, Any]]:
    return [point.settings for point in Grid(scenario(sweep, **tables)).points()]


# ---- axes


def test_points_are_the_product_with_the_last_axis_fastest() -> None:
    found = settings_of({"fsdp.sharding_factor": [1, 2], "fsdp.forward_prefetch": [0, 1, 2]})
    assert found == [
        {"fsdp.sharding_factor": f, "fsdp.forward_prefetch": p} for f in (1, 2) for p in (0, 1, 2)
    ]


def test_zipped_keys_vary_together_and_several_tables_multiply() -> None:
    zips = [
        {"workload.units": [2, 4], "workload.parameters": [40, 20]},
        {"hardware.nodes": [1, 2], "hardware.gpus_per_node": [8, 4]},
    ]
    found = [tuple(settings.values()) for settings in settings_of({"zip": zips})]
    assert found == [(2, 40, 1, 8), (2, 40, 2, 4), (4, 20, 1, 8), (4, 20, 2, 4)]


def test_unquoted_dotted_keys_mean_the_same() -> None:
    nested = {
        "fsdp": {"sharding_factor": [1, 2], "overrides": {"unit.0": {"forward_prefetch": [[]]}}}
    }
    quoted = {
        "fsdp.sharding_factor": [1, 2],
        'fsdp.overrides."unit.0".forward_prefetch': [[]],
    }
    assert settings_of(nested) == settings_of(quoted)


def test_a_value_may_be_a_table_a_list_or_a_whole_table_of_the_scenario() -> None:
    values = ["block", {"blocks": 2}, ["layers.*.mlp"]]
    assert [s["fsdp.unit"] for s in settings_of({"fsdp.unit": values})] == values
    runtimes = [{"runtime": "fsdp1", "limit_all_gathers": False}, {"runtime": "ddp"}]
    grid = Grid(scenario({"fsdp": runtimes}))
    kinds = [grid.variations.at(p.settings).fsdp.runtime for p in grid.points()]
    assert kinds == ["fsdp1", "ddp"]


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ({"first": 1, "last": 8, "factor": 2}, (1, 2, 4, 8)),
        ({"first": 1, "last": 9, "factor": 2}, (1, 2, 4, 8)),
        ({"first": 2, "last": 8, "step": 3}, (2, 5, 8)),
        ({"first": 0.1, "last": 0.5, "step": 0.1}, (0.1, 0.2, 0.3, 0.4, 0.5)),
        ({"first": 5, "last": 5, "step": 1}, (5,)),
    ],
)
def test_ranges_include_both_ends(table: dict[str, Any], values: tuple[float, ...]) -> None:
    assert Range.model_validate(table).values() == values


def test_a_range_may_have_as_many_values_as_it_says() -> None:
    assert len(Range(first=1, last=MAX_RANGE, step=1).values()) == MAX_RANGE
    with pytest.raises(ValueError, match="more than 100,000 values"):
        Range(first=1, last=MAX_RANGE + 1, step=1).values()


@given(first=st.integers(1, 1000), span=st.integers(0, 1000), step=st.integers(1, 50))
def test_range_by_step_is_pythons(first: int, span: int, step: int) -> None:
    found = Range(first=first, last=first + span, step=step).values()
    assert found == tuple(range(first, first + span + 1, step))
    assert all(type(value) is int for value in found)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_dotted_keys_split_and_join(parts: list[str]) -> None:
    assert split_key(join_key(parts)) == tuple(parts)


def test_set_key_leaves_the_original_alone() -> None:
    data = {"a": {"b": 1}}
    assert set_key(data, ("a", "c"), 2) == {"a": {"b": 1, "c": 2}}
    assert data == {"a": {"b": 1}}


def test_settings_of_an_index_are_those_of_the_point() -> None:
    grid = Grid(
        scenario(
            {
                "fsdp.sharding_factor": [1, 2, 4],
                "fsdp.forward_prefetch": [0, 1],
                "zip": {"workload.units": [2, 3], "workload.parameters": [6, 4]},
            }
        )
    )
    points = list(grid.points())
    assert len(points) == len(grid) == 12
    assert [grid.settings(point.index) for point in points] == [p.settings for p in points]
    assert list(grid.points(5)) == points[5:]


def test_check_prints_a_sweep_that_can_be_read_back() -> None:
    import tomllib

    sweep = {
        "fsdp.unit": ["block", {"blocks": 2}],
        "fsdp.sharding_factor": {"first": 1, "last": 8, "factor": 2},
        "zip": [{"workload.units": [2, 4], "workload.parameters": [40, 20]}],
        "where": ["fsdp.sharding_factor > 1"],
    }
    original = scenario(sweep)
    again = load(tomllib.loads(as_toml(resolved(original))))
    assert list(Grid(again).points()) == list(Grid(original).points())


# ---- where


def test_where_leaves_points_out_and_keeps_their_index() -> None:
    grid = Grid(
        scenario(
            {
                "fsdp.sharding_factor": [1, 2, 4, 8],
                "where": "fsdp.sharding_factor <= hardware.gpus_per_node and "
                "fsdp.sharding_factor != 2",
            }
        )
    )
    assert [(p.index, p.settings["fsdp.sharding_factor"]) for p in grid.points()] == [
        (0, 1),
        (2, 4),
    ]


@pytest.mark.parametrize(
    ("sweep", "kept"),
    [
        # the base scenario's value, a swept one, a quantity, a derived one
        ({"hardware.nodes": [1, 2, 4], "where": "hardware.nodes * hardware.gpus_per_node >= 8"}, 2),
        ({"hardware.nodes": [1, 2, 4], "where": "world_size == 8"}, 1),
        ({"hardware.nodes": [1, 2, 4], "where": "fsdp.sharding_factor == 16"}, 1),
        ({"fsdp.sharding_factor": [1, 2, 4], "where": "replicas in [2, 4]"}, 2),
        ({"hardware.memory": ["40 GiB", "80 GiB"], "where": "hardware.memory > '60 GiB'"}, 1),
        # a preset decides what the file leaves out
        (
            {
                "hardware.gpu": ["H100-SXM-80GB", "H200-SXM-141GB"],
                "where": "hardware.memory > '100 GB'",
            },
            1,
        ),
        ({"fsdp.forward_prefetch": [0, 1], "where": "training.param_dtype == none"}, 2),
        ({"fsdp.forward_prefetch": [0, 1], "where": "not (fsdp.unit == 'block')"}, 0),
        ({"fsdp.forward_prefetch": [0, 1], "where": ["true", "max(1, 2) == 2", "-1 < 0"]}, 2),
    ],
)
def test_where_sees_resolved_keys(sweep: dict[str, Any], kept: int) -> None:
    assert len(settings_of(sweep)) == kept


def test_where_keeps_invalid_points_whose_value_nobody_knows() -> None:
    sweep = {"fsdp.sharding_factor": [3, 4], "where": "replicas == 2"}
    assert [s["fsdp.sharding_factor"] for s in settings_of(sweep)] == [3, 4]


def test_where_that_compares_what_cannot_be_compared_is_an_error() -> None:
    grid = Grid(scenario({"fsdp.forward_prefetch": [0, 1], "where": "training.param_dtype > 3"}))
    with pytest.raises(ScenarioError, match=r"sweep\.where.*'>' not supported"):
        list(grid.points())


numbers = st.integers(-50, 50)
atoms = st.one_of(numbers.map(str), st.sampled_from(["a.b", "a.c"]))
arithmetic = st.recursive(
    atoms,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%", "/"]), inner).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})"
    ),
    max_leaves=6,
)
conditions = st.recursive(
    st.tuples(arithmetic, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), arithmetic).map(
        lambda t: f"{t[0]} {t[1]} {t[2]}"
    ),
    lambda inner: st.one_of(
        inner.map(lambda c: f"not ({c})"),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            lambda t: f"({t[0]}) {t[1]} ({t[2]})"
        ),
    ),
    max_leaves=4,
)


@given(conditions, numbers, numbers)
def test_expressions_mean_what_python_means(text: str, b: int, c: int) -> None:
    class Names:
        pass

    names = Names()
    names.b, names.c = b, c  # type: ignore[attr-defined]
    try:
        expected = bool(eval(text, {"a": names}))
    except ZeroDivisionError:
        with pytest.raises(ValueError, match=r"zero|modulo"):
            parse_expression(text)(lambda name: operator.attrgetter(name[2:])(names))
        return
    found = parse_expression(text)(lambda name: operator.attrgetter(name[2:])(names))
    assert bool(found) == expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "fsdp.unit.__class__()",
        "open('/etc/passwd')",
        "(lambda: 1)()",
        "[x for x in (1, 2)]",
        "2 ** 100000",
        "'a' 'b' if true else 1",
        "fsdp[0]",
        "f'{fsdp}'",
        "a := 1",
        "x" * 2000,
        "(" * 500 + "1" + ")" * 500,
        "",
        "1 +",
        "b'bytes'",
        "max(key=1)",
    ],
)
def test_expressions_refuse_all_else(text: str) -> None:
    with pytest.raises(ValueError):
        parse_expression(text)


def test_strings_are_not_numbers() -> None:
    with pytest.raises(ValueError, match="'block' is not a number"):
        parse_expression("fsdp.unit * 1000000000 == 1")(lambda name: "block")


# ---- mistakes


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"fsdp.sharding_facto": [1]}, "did you mean sharding_factor?"),
        ({"fdsp.unit": [1]}, "did you mean fsdp?"),
        ({"hardware.nccl.simple.bas": [1]}, "did you mean base?"),
        ({'fsdp.overrides."layers.*".reshard_after': [1]}, "did you mean reshard_after_forward?"),
        ({"fsdp.limit_all_gathers": [True]}, "FSDP2 has no rate limiter"),
        ({"training.seq_len.x": [1]}, "inside a plain value"),
        ({"model.hidden": [1]}, "unknown key 'hidden'"),
        ({"sweep.where": [1]}, "sweep.where cannot be swept"),
        ({"title": ["a"]}, "title cannot be swept"),
        ({"fsdp.unit": "block"}, "is not a list of values"),
        ({"fsdp.unit": []}, "is not a list of values"),
        ({"fsdp.sharding_factor": {"first": 4, "last": 1, "step": 1}}, "more than last"),
        ({"fsdp.sharding_factor": {"first": 1, "last": 4}}, "needs either step or factor"),
        ({"fsdp.sharding_factor": {"first": 1, "last": 4, "step": 0}}, "more than zero"),
        ({"fsdp.sharding_factor": {"first": 1, "last": 4, "factor": 1}}, "factor > 1"),
        ({"zip": [{"workload.units": [1, 2], "workload.parameters": [1]}]}, "differ in length"),
        ({"zip": [{}]}, "varies nothing"),
        ({}, 'varies nothing; write for example "fsdp.sharding_factor" = [1, 2, 4]'),
        ({"zip": [], "where": []}, "varies nothing"),
        ({"hardware.nodes": [1], "hardware": [{"nodes": 1}]}, "set twice"),
        ({"fsdp.unit": ["block"], "zip": [{"fsdp.unit": ["model"]}]}, "fsdp.unit is set twice"),
        ({"fsdp.unit": ["block"], "where": "fsdp.x > 1"}, "unknown key 'x'"),
        ({"fsdp.unit": ["block"], "where": "1 +"}, "is not an expression"),
        (
            {"training.seq_len": {"first": 1, "last": 10**9, "step": 1}},
            "a range of more than 100,000 values",
        ),
        (
            {
                "training.seq_len": {"first": 1, "last": 9000, "step": 1},
                "training.micro_batch_size": {"first": 1, "last": 9000, "step": 1},
            },
            "81,000,000 points; at most 10,000,000",
        ),
    ],
)
def test_a_mistake_gives_one_message_that_says_what_to_do(sweep: Any, words: str) -> None:
    message = fault(sweep)
    assert message.startswith("scenario: sweep")
    assert words in message


def test_all_unknown_keys_are_reported_at_once() -> None:
    message = fault({"fsdp.x": [1], "hardware.y": [1], "where": "zz.z > 1"})
    assert all(part in message for part in ("fsdp.x", "hardware.y", "zz.z"))


def test_while_the_runtime_varies_keys_of_any_runtime_are_known() -> None:
    found = settings_of({"fsdp.runtime": ["fsdp1", "fsdp2"], "fsdp.limit_all_gathers": [True]})
    assert len(found) == 2


def test_nothing_to_sweep_is_an_error() -> None:
    with pytest.raises(ScenarioError, match=r"has no \[sweep\] table"):
        Grid(load(TABLES))


def test_run_ignores_the_sweep_table() -> None:
    from fsdpsim.simulate import simulate

    with_table = simulate(scenario({"fsdp.sharding_factor": [1, 2]}))
    assert with_table.iteration_times == simulate(load(TABLES)).iteration_times


@pytest.mark.parametrize("value", [math.nan, math.inf, {"0": -math.inf}])
def test_values_that_are_no_numbers_are_refused(value: Any) -> None:
    assert "nan or inf" in fault({"noise.jitter": [0.1, value]})
