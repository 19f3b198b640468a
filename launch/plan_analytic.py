"""What a training step needs at the least, from the config and the mesh alone.

Everything is per device. A step that keeps to the design (report section 5) moves these bytes and
no more: weights are gathered where they are used, in the compute dtype, and their f32 gradients
leave scattered; context-parallel ranks tell each other their latents; tokens travel to their
experts and back.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from c2 import models
from c2.config import located
from c2.models import MLAConfig
from c2.models.flops import forward_cost
from c2.parallel import rules
from c2.parallel.mesh import AXES, EXPERTS, REST, TOKENS
from c2.training import sharding
from c2.training.objective import trained_part
from launch.plan_case import Case, mesh_lengths

WEIGHTS, GRADIENTS, CONTEXT, EXPERT_TOKENS = "weights", "gradients", "context", "experts"


@dataclass(frozen=True)
class Traffic:
    """Bytes that must reach a device in a step, for one purpose over some axes of the mesh."""

    purpose: str
    kind: str
    axes: tuple[str, ...]
    moved: float


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The analytic part of a plan, per device and step unless said.

    Attributes:
      parameters: of the whole model and used by a token.
      state: bytes of what lasts from step to step, and of gradients, by kind.
      working: bytes of the largest buffers of a step, by kind.
      model_flops: three times those of a forward pass; every row is one document.
      hardware_flops: with what the backward pass computes again.
      traffic: what must reach the device.
      rows: tokens that reach a device's experts in a micro-batch, times experts of each there.
      sent: share of the rows of exchange buffers that hold a token.
    """

    parameters: dict[str, int]
    state: dict[str, float]
    working: dict[str, float]
    model_flops: float
    hardware_flops: float
    traffic: list[Traffic]
    rows: float
    sent: float


@dataclass(frozen=True)
class _Part:
    """A parameter tensor: its spec, over how many devices it lies, whether layers repeat it."""

    spec: Any
    pieces: int
    layered: bool

    @property
    def routed(self) -> bool:
        return rules.is_routed(self.spec)

    def local(self, mesh: Any) -> float:
        """Elements that a device gathers to use it."""
        return self.spec.size / (rules.size(mesh, EXPERTS) if self.routed else 1)

    def ranks(self, mesh: Any) -> float:
        """Devices that it gathers them from, itself included."""
        return self.pieces / (rules.size(mesh, EXPERTS) if self.routed else 1)


def needs(planned: Case) -> Needs:
    """Counts.

    Raises:
      ConfigError: if the model, the batch or the mesh do not go together.
    """
    model, layout = planned.model, planned.layout
    mesh = jax.sharding.AbstractMesh(mesh_lengths(planned), AXES)
    parts = _parts(planned, mesh)
    trained = _parts(planned, mesh, trained=True)
    width = np.dtype(model.dtype).itemsize
    tokens = planned.tokens / planned.topology.devices
    count = models.count(model)
    cost = forward_cost(model)
    forward = float(cost(planned.phase.context)) * planned.phase.batch / planned.topology.devices
    again = 1 if model.remat == "full" else 0
    reached = _ranks_reached(model, layout.expert)
    return Needs(
        parameters={"total": count.total, "active": count.active},
        state={
            "weights": sum(p.spec.size / p.pieces * 4 for p in parts),
            "moments": sum(p.spec.size / p.pieces * 8 for p in trained if p.spec.trainable),
            "gradients": sum(p.spec.size / p.pieces * 4 for p in trained),
        },
        working=_working(planned, mesh, parts, width),
        model_flops=3 * forward,
        hardware_flops=(3 + again) * forward,
        traffic=_traffic(planned, mesh, parts, trained, width, again),
        rows=tokens / _expert_parts(planned) * (model.moe.top_k if model.moe else 0),
        sent=reached / layout.expert,
    )


def _parts(planned: Case, mesh: Any, trained: bool = False) -> list[_Part]:
    specs = models.spec(planned.model)
    with located("config"):
        places = sharding.partitions(planned.model, mesh, planned.layout)
    if trained or planned.phase.mtp is None:  # a module that is not trained is no part of the step
        specs, places = (trained_part(tree, planned.phase.mtp) for tree in (specs, places))

    def part(spec, place) -> _Part:
        pieces = math.prod(
            rules.size(mesh, over if isinstance(over, tuple) else (over,)) for over in place if over
        )
        return _Part(spec, pieces, "layer" in spec.axes)

    return jax.tree.leaves(jax.tree.map(part, specs, places))


def _ranks_reached(model: Any, ranks: int) -> float:
    """Ranks with at least one of a token's experts, if experts are chosen evenly."""
    if model.moe is None:
        return 0.0
    return ranks * (1 - (1 - 1 / ranks) ** model.moe.top_k)


def _expert_parts(planned: Case) -> int:
    return planned.phase.micro_batches * planned.layout.expert_micro_batches


def _working(planned: Case, mesh: Any, parts: list[_Part], width: int) -> dict[str, float]:
    model, layout, phase = planned.model, planned.layout, planned.phase
    tokens = planned.tokens / planned.topology.devices / phase.micro_batches
    rows = tokens * layout.context / phase.context  # of a batch, on a rank
    found = {"activations": model.layers * tokens * model.hidden * width}
    if model.remat != "full":
        found = {}  # depends on what the compiler keeps
    if layout.weights == "sharded":
        whole = {True: 0.0, False: 0.0}
        for part in parts:
            layers = part.spec.shape[0] if part.layered else 1
            whole[part.layered] += part.local(mesh) / layers * width
        found["gathered weights"] = sum(whole.values())
    attention = model.attention
    latent = isinstance(attention, MLAConfig)
    if latent:
        found["keys and values"] = (
            rows * phase.context * (attention.heads * (attention.qk + attention.v)) * width
        )
        found["latents"] = rows * phase.context * (attention.kv_lora + attention.rope) * width
    if model.moe is not None:
        slots = tokens * layout.expert / layout.expert_micro_batches
        wide = model.hidden + 3 * model.moe.intermediate
        found["expert buffers"] = slots * width * (2 * model.hidden + model.moe.top_k * wide)
    return found


def _traffic(
    planned: Case, mesh: Any, parts: list, trained: list, width: int, again: int
) -> list[Traffic]:
    model, layout, batches = planned.model, planned.layout, planned.phase.micro_batches
    tokens = planned.tokens / planned.topology.devices
    found = []
    for routed in (False, True):
        axes = REST if routed else AXES
        gathered = scattered = summed = 0.0
        for part in parts:
            if part.routed == routed:
                missing = part.local(mesh) * (1 - 1 / part.ranks(mesh)) * batches
                gathered += missing * width * (1 + again * part.layered)
        for part in trained:
            if part.routed == routed:
                scattered += part.local(mesh) * (1 - 1 / part.ranks(mesh)) * 4 * batches
                same = planned.topology.devices / part.pieces  # devices that hold this piece
                summed += 2 * part.spec.size / part.pieces * (1 - 1 / same) * 4
        found.append(Traffic(WEIGHTS, "all-gather", axes, gathered))
        found.append(Traffic(GRADIENTS, "reduce-scatter", axes, scattered))
        found.append(Traffic(GRADIENTS, "all-reduce", axes, summed))
    if layout.context > 1:
        per_token = _exchanged(model, layout.exchange) * width * model.layers
        others = tokens * (layout.context - 1)
        found.append(Traffic(CONTEXT, "all-gather", TOKENS, others * per_token * (1 + again)))
        found.append(Traffic(CONTEXT, "reduce-scatter", TOKENS, others * per_token))
    if model.moe is not None and layout.expert > 1:
        remote = _ranks_reached(model, layout.expert) * (1 - 1 / layout.expert)
        once = tokens * remote * model.hidden * width * model.moe_layers
        share = 33 / 32 / width if layout.dispatch == "mxfp8" else 1.0
        # to the experts, again for the backward pass, and gradients of results; results, and
        # gradients of tokens
        there, back = once * (share * (1 + again) + 1), 2 * once
        found.append(Traffic(EXPERT_TOKENS, "ragged-all-to-all", EXPERTS, there + back))
    return [x for x in found if x.moved]


def _exchanged(model: Any, exchange: str) -> int:
    """Elements of a token and layer that context-parallel ranks tell each other."""
    attention = model.attention
    if not isinstance(attention, MLAConfig):
        return 2 * attention.kv_heads * attention.head_dim
    if exchange == "latents":
        return attention.kv_lora + attention.rope
    return attention.heads * (attention.nope + attention.v) + attention.rope
