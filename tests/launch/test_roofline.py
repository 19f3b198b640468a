"""Times of collectives against routing by hand, schedules against sums by hand, peaks."""

import itertools
import re
from collections import Counter
from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import hlo, plan_case, roofline
from launch.hlo_products import Assumptions
from launch.roofline import CHIPS, Fabric

LINK = CHIPS["v5p"].link


def torus(*lengths):
    """The fabric of a v5p slice whose mesh has one axis per dimension."""
    places = np.array(list(itertools.product(*map(range, lengths))))
    where = plan_case.topology(f"v5p:{'x'.join(map(str, lengths))}")
    return Fabric(CHIPS["v5p"], where, places, dict(zip("xyz", lengths, strict=False)))


def hosts(number, each):
    ids = np.arange(number * each)
    where = plan_case.topology(f"b200:{number}x{each}")
    places = np.stack(np.divmod(ids, each), 1)
    return Fabric(CHIPS["b200"], where, places, {"host": number, "gpu": each})


def busiest_link(lengths, rings):
    """Messages over the busiest link if all send one to each, by dimension, the shortest way."""
    load = Counter()
    for a, b in itertools.product(itertools.product(*map(range, lengths)), repeat=2):
        at = list(a)
        for d, (n, ring) in enumerate(zip(lengths, rings, strict=True)):
            forward = (b[d] - at[d]) % n if ring else max(b[d] - at[d], 0)
            backward = (at[d] - b[d]) % n if ring else max(at[d] - b[d], 0)
            halves = [(1, forward, 1.0)] if forward and (forward < backward or not backward) else []
            if backward and (backward < forward or not forward):
                halves = [(-1, backward, 1.0)]
            if forward and forward == backward:  # both ways are shortest: half on each
                halves = [(1, forward, 0.5), (-1, backward, 0.5)]
            for step, hops, share in halves:
                for hop in range(hops):
                    here = (*at[:d], (at[d] + step * hop) % n, *at[d + 1 :])
                    load[here, d, step] += share
            at[d] = b[d]
    return max(load.values())


@pytest.mark.parametrize("lengths", [(4,), (8,), (2,), (4, 4), (2, 4), (4, 8), (2, 2), (4, 4, 4)])
def test_an_exchange_takes_as_long_as_its_busiest_link(lengths):
    fabric = torus(*lengths)
    devices = int(np.prod(lengths))
    messages = busiest_link(lengths, [n > 2 for n in lengths])
    size = 1e6  # of a message
    seconds = fabric.seconds("all-to-all", size * (devices - 1), tuple(range(devices)))
    assert seconds == pytest.approx(messages * size / LINK)


@pytest.mark.parametrize(
    ("group", "links"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 2),  # a ring along the last dimension
        ([0, 1, 2, 3], 1),  # half of it is a line
        ([0, 8], 1),
        (range(0, 32, 8), 2),
        (range(32), 4),
        (range(64), 5),  # the first dimension has two neighbours, not a ring
    ],
)
def test_a_gather_arrives_over_all_links_within_its_group(group, links):
    fabric = torus(2, 4, 8)
    moved = 3e9
    assert fabric.seconds("all-gather", moved, tuple(group)) == pytest.approx(
        moved / (links * LINK)
    )


@given(st.integers(2, 6), st.integers(1, 8), st.floats(1e3, 1e12))
@settings(max_examples=40, deadline=None)
def test_what_a_host_lacks_comes_to_it_once_over_all_its_cards(number, each, piece):
    fabric = hosts(number, each)
    devices = number * each
    seconds = fabric.seconds("all-gather", piece * (devices - 1), tuple(range(devices)))
    across = piece * (devices - each) / each / fabric.chip.network
    inside = (piece * (devices - 1) - piece * (devices - each) / each) / fabric.chip.link
    assert seconds == pytest.approx(max(across, inside))


@given(st.integers(2, 6), st.integers(2, 8))
@settings(max_examples=20, deadline=None)
def test_exchanges_between_hosts_use_the_cards_and_those_inside_only_nvlink(number, each):
    fabric = hosts(number, each)
    everyone = tuple(range(number * each))
    piece = 1e6
    seconds = fabric.seconds("all-to-all", piece * (len(everyone) - 1), everyone)
    assert seconds == pytest.approx(piece * (number - 1) * each / fabric.chip.network)
    inside = fabric.seconds("all-to-all", piece * (each - 1), everyone[:each])
    assert inside == pytest.approx(piece * (each - 1) / fabric.chip.link)


def test_groups_and_axes_name_each_other():
    fabric = torus(2, 4, 8)
    for axes in itertools.chain.from_iterable(
        itertools.combinations("xyz", n) for n in range(1, 4)
    ):
        assert fabric.over(fabric.group(axes)) == axes


def schedule(lines, other=""):
    text = f"HloModule m\n\n{other}\nENTRY %main () -> f32[] {{\n{lines}}}\n"
    module = hlo.parse(text)
    return roofline.simulate(module, torus(4, 4, 4), Assumptions())


N = 4096
A = f"  %a = bf16[{N},{N}] parameter(0)\n"
WORK = f"  %w{{}} = bf16[{N},{N}] dot(%a, %a), lhs_contracting_dims={{{{1}}}}\n"
GROUP = "channel_id=1, replica_groups={{0,1,2,3},{..}}, dimensions={0}"
START = f"  %s = (bf16[{N},{N}], bf16[{4 * N},{N}]) all-gather-start(%a), {GROUP}\n"
DONE = f"  %d = bf16[{4 * N},{N}] all-gather-done(%s)\n"
COMPUTE = 2 * N**3 / 459e12
GATHER = 3 * N * N * 2 / (2 * LINK)


@pytest.mark.parametrize("products", [0, 1, 5, 9])
def test_work_between_start_and_end_hides_a_collective_as_far_as_it_goes(products):
    work = "".join(WORK.format(i) for i in range(products))
    found = schedule(A + START + work + DONE)
    exposed = max(GATHER - products * COMPUTE, 0)
    assert found.seconds == pytest.approx(products * COMPUTE + exposed)
    assert found.exposed["z"] == pytest.approx(exposed)
    assert found.waits == {f"all-gather of bf16[{4 * N},{N}]": pytest.approx(exposed)}
    assert found.links["z"] == pytest.approx(GATHER)
    assert found.compute == pytest.approx(products * COMPUTE)


def test_a_collective_with_nothing_beside_it_adds_its_time_and_two_share_their_links():
    first, second = (f"  %g{i} = bf16[{4 * N},{N}] all-gather(%a), {GROUP}\n" for i in range(2))
    found = schedule(A + first + WORK.format(1) + second)
    assert found.seconds == pytest.approx(COMPUTE + 2 * GATHER)
    both = schedule(A + START + second + DONE)
    assert both.seconds == pytest.approx(2 * GATHER)


def test_loops_multiply_everything():
    body = f"%body (p: bf16[{N},{N}]) -> bf16[] {{\n{A}{START}{WORK.format(1)}{DONE}}}\n"
    loop = (
        "  %l = (s32[]) while(%a), condition=%c, body=%body, "
        'backend_config={"known_trip_count":{"n":"7"}}\n'
    )
    found = schedule(A + loop, body)
    assert found.seconds == pytest.approx(7 * max(COMPUTE, GATHER))
    assert found.flops["bf16"] == 7 * 2 * N**3


def test_a_slice_of_a_stack_costs_its_own_bytes_and_not_the_stacks():
    inner = (
        "%f (p: bf16[60,4096,4096], i: s32[]) -> bf16[4096,4096] {\n"
        "  %p = bf16[60,4096,4096] parameter(0)\n  %i = s32[] parameter(1)\n"
        "  ROOT %s = bf16[1,4096,4096] dynamic-slice(%p, %i)\n}\n"
    )
    lines = (
        "  %stack = bf16[60,4096,4096] parameter(0)\n  %i = s32[] parameter(1)\n"
        "  %x = bf16[4096,4096] fusion(%stack, %i), kind=kLoop, calls=%f\n"
    )
    found = schedule(lines, inner)
    assert found.memory * 2765e9 == pytest.approx(2 * N * N * 2, rel=1e-6)
    assert found.binds == "memory"


@pytest.mark.parametrize("chip", ["h100", "h200", "b200"])
def test_memory_of_gpus_is_what_their_compiler_is_told(chip):
    text = resources.files("launch").joinpath(f"chips/{chip}.txtpb").read_text()
    told = int(re.search(r"device_memory_size: (\d+)", text)[1])
    assert CHIPS[chip].hbm == told
    bandwidth = int(re.search(r"memory_bandwidth: (\d+)", text)[1])
    assert CHIPS[chip].hbm_bandwidth == pytest.approx(bandwidth, rel=0.05)


def test_a_chip_of_two_devices_is_shared_by_them():
    one = CHIPS["tpu7x"]
    assert one.flops["bf16"] * 2 == 2307e12 and one.flops["f8"] == 2 * one.flops["bf16"]
    where = plan_case.topology("tpu7x:4x4x4", 2)
    places = np.array(
        [(*p, core) for p in itertools.product(range(4), repeat=3) for core in (0, 1)]
    )
    fabric = Fabric(one, where, places, {"chip": 64, "core": 2})
    same_core, moved = tuple(range(0, 8, 2)), 1e9
    assert fabric.seconds("all-gather", moved, same_core) == pytest.approx(moved / one.link)
    both = fabric.seconds("all-gather", moved, tuple(range(8)))
    assert both == pytest.approx(moved / one.link / 2)
