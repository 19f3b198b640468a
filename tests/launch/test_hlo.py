"""Reading compiled modules: synthetic ones, and two of real compilers."""

import gzip
import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import hlo, hlo_traffic
from launch.hlo import Shape
from launch.hlo_products import Assumptions, products

MODULES = Path(__file__).parent / "modules"
ALL = Assumptions()


def read(name):
    return hlo.parse(gzip.decompress((MODULES / f"{name}.hlo.gz").read_bytes()).decode())


def nest(trips, noted):
    """A module of nested loops around one 2x3x5 product; ``noted`` says how bounds are given."""
    texts, inner = [], "  %p = f32[2,3] dot(%a, %b), lhs_contracting_dims={1}\n"
    for depth, (n, how) in enumerate(zip(trips, noted, strict=True)):
        limit, note = "%limit", ""
        if how == "noted":
            note = f', backend_config={{"known_trip_count":{{"n":"{n}"}}}}'
            n = 0  # and what the condition says is not looked at
        texts.append(
            f"%body.{depth} (t: (s32[], s32[])) -> (s32[], s32[]) {{\n"
            "  %a = f32[2,5]{1,0:T(8,128)S(1)} parameter(0)\n  %b = f32[5,3] parameter(1)\n"
            f"{inner}"
            "  ROOT %r = (s32[], s32[]) tuple(%a, %b)\n}\n"
            f"%condition.{depth} (t: (s32[], s32[])) -> pred[] {{\n"
            "  %t = (s32[]{:T(128)}, /*index=1*/s32[]) parameter(0)\n"
            "  %i = s32[] get-tuple-element(%t), index=0\n"
            + (
                "  %limit = s32[] get-tuple-element(%t), index=1\n"
                if how == "carried"
                else f"  %limit = s32[] constant({n})\n"
            )
            + f"  ROOT %less = pred[] compare(%i, {limit}), direction=LT\n}}\n"
        )
        inner = (
            f"  %zero.{depth} = s32[] constant(0)\n  %n.{depth} = s32[] constant({n})\n"
            f"  %start.{depth} = (s32[], s32[]) tuple(%zero.{depth}, %n.{depth})\n"
            f"  %loop.{depth} = (s32[], s32[]) while(%start.{depth}), "
            f"condition=%condition.{depth}, body=%body.{depth}{note}\n"
        )
    return (
        "HloModule nest, is_scheduled=true\n\n"
        + "\n".join(texts)
        + f"\nENTRY %main () -> f32[] {{\n{inner}}}\n"
    )


def totals(module, given=ALL):
    """FLOPs by kernel and type, and collectives with their runs."""
    flops, collectives = Counter(), []
    for name, runs in module.runs().items():
        for instruction in module.computations[name].values():
            for product in products(module, name, instruction, given):
                flops[product.kernel, product.dtype] += product.flops * runs
            if found := hlo_traffic.collective(module, name, instruction, given):
                collectives.append((found, runs))
    return flops, collectives


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["noted", "constant", "carried"]))))
@settings(max_examples=50, deadline=None)
def test_products_in_nested_loops_count_as_often_as_they_run(loops):
    if not loops:
        return
    flops, _ = totals(hlo.parse(nest(*zip(*loops, strict=True))))
    assert flops["", "f32"] == math.prod(n for n, _ in loops) * 2 * 2 * 3 * 5


def test_lines_that_say_something_else_are_passed_over_and_a_bound_not_found_counts_once():
    text = nest([7], ["constant"]).replace("direction=LT", "direction=NE")
    text = text.replace("  ROOT %r", "  what is this?\n  %x = ???\n  ROOT %r")
    module = hlo.parse(text + "\ntrailing {\n}\n")
    loop = module.computations["main"]["loop.0"]
    assert module.trips("main", loop) is None
    assert module.runs()["body.0"] == 1


def test_a_text_that_is_no_module_is_an_error():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.parse("HloModule x\n")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("pred", 6), ("bf16", 12), ("f32", 24), ("s4", 3), ("f8e4m3fn", 6), ("u32", 24), ("token", 0)],
)
def test_bytes_of_shapes(dtype, expected):
    assert Shape(dtype, (2, 3)).bytes == expected


def one(line, operands=""):
    """The module of a schedule with one line, after instructions for its operands."""
    return hlo.parse(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{operands}  {line}\n}}\n")


SIZES = [(n,) for n in range(1, 9)]


@given(
    st.permutations(range(3)), st.tuples(*[st.integers(1, 4)] * 3), st.sampled_from([1, 2, 4, 8])
)
@settings(max_examples=50, deadline=None)
def test_groups_written_as_iota_are_those_of_numpy(order, dims, groups):
    devices = math.prod(dims)
    if devices % groups:
        return
    size = devices // groups
    where = f"[{groups},{size}]<=[{','.join(map(str, dims))}]T({','.join(map(str, order))})"
    module = one(
        f"%g = f32[{8 * size}] all-gather(%x), replica_groups={where}, dimensions={{0}}",
        "  %x = f32[8] parameter(0)\n",
    )
    found = hlo_traffic.collective(module, "main", module.computations["main"]["g"], Assumptions())
    expected = np.arange(devices).reshape(dims).transpose(order).reshape(groups, size)[0]
    assert found.group == tuple(expected)
    assert found.moved == 8 * 4 * (size - 1)


def brute_force(lhs, size, stride, low, high, hole, step):
    """Pairs of an output and a window position that meet an input, one spatial dimension."""
    padded = (lhs - 1) * hole + 1 + low + high
    outputs = (padded - (size - 1) * step - 1) // stride + 1
    values = {low + i * hole for i in range(lhs)}
    pairs = itertools.product(range(outputs), range(size))
    return outputs, sum(o * stride + k * step in values for o, k in pairs)


@given(*[st.integers(1, 5)] * 3, *[st.integers(0, 4)] * 2, *[st.integers(1, 3)] * 2)
@settings(max_examples=80, deadline=None)
def test_convolutions_count_the_pairs_that_meet(lhs, size, stride, low, high, hole, step):
    if (lhs - 1) * hole + 1 + low + high < (size - 1) * step + 1:
        return
    outputs, met = brute_force(lhs, size, stride, low, high, hole, step)
    window = f"size={size} stride={stride} pad={low}_{high} lhs_dilate={hole} rhs_dilate={step}"
    module = one(
        f"%c = f32[7,{outputs},3] convolution(%x, %w), window={{{window}}}, "
        "dim_labels=b0f_0io->b0f",
        f"  %x = f32[7,{lhs},5] parameter(0)\n  %w = f32[{size},5,3] parameter(1)\n",
    )
    assert totals(module)[0]["", "f32"] == 2 * 7 * 3 * 5 * met


TOKENS, WIDTH, LAYERS = 2048, 2048, 3  # of the module for v5p


def test_the_collectives_and_products_of_a_module_for_tpus():
    flops, collectives = totals(read("v5p_4x4x4"))
    # two dense products a layer, each forward, again, and for both gradients
    assert flops["", "bf16"] == LAYERS * 2 * 4 * 2 * TOKENS * WIDTH**2
    # a grouped product of all rows of four ranks, forward and for both gradients
    assert flops["grouped_matmul", "bf16"] == LAYERS * 3 * 2 * 4 * TOKENS * WIDTH**2
    mib = 2**20
    found = Counter()
    for c, runs in collectives:
        if c.moved >= mib:
            found[c.kind, len(c.group), c.moved / mib, c.key is not None] += runs
    assert found == {
        ("all-gather", 16, 60, True): 2 * LAYERS,  # 8 experts of a layer; one beside other work
        ("all-gather", 64, 7.875, False): 4 * LAYERS,  # a dense matrix
        ("all-gather", 4, 24, False): 2 * LAYERS,  # tokens of the other context-parallel ranks
        ("reduce-scatter", 16, 60, False): LAYERS,
        ("reduce-scatter", 4, 24, False): LAYERS,
        ("all-reduce", 64, 31.5, False): LAYERS,  # what should have been scattered
        ("ragged-all-to-all", 4, 6, True): 2 * LAYERS,
        ("ragged-all-to-all", 4, 6, False): LAYERS,
        ("ragged-all-to-all", 4, 24, True): 2 * LAYERS,
    }


def test_the_collectives_and_products_of_a_module_for_gpus():
    tokens, width = 1024, 512
    flops, collectives = totals(read("b200_2x8"))
    assert flops["", "bf16"] == LAYERS * 2 * 4 * 2 * tokens * width**2
    # forward twice two products, three and four for gradients: 11 over half of all pairs
    assert flops["flash_attention", "bf16"] == LAYERS * 11 * tokens * 4 * tokens * width
    kinds = Counter()
    for c, runs in collectives:
        kinds[c.kind] += runs
    assert kinds["reduce-scatter"] == 3 * LAYERS
    assert kinds["all-gather"] == 6 * LAYERS
    assert kinds["all-reduce"] == 1
    scattered = [(c, runs) for c, runs in collectives if c.kind == "reduce-scatter" and c.key]
    assert [(len(c.group), runs) for c, runs in scattered] == [(16, 2)]


def test_kernels_count_the_rows_and_pairs_that_hold_something():
    module = read("b200_2x8")
    all_rows = totals(module)[0]
    some = totals(module, Assumptions(visible=0.125, rows=1024, sent=0.5))[0]
    assert some["flash_attention", "bf16"] == all_rows["flash_attention", "bf16"] / 4
    assert some["grouped_matmul", "bf16"] == LAYERS * 3 * 2 * 1024 * 512**2
