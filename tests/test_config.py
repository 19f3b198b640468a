"""Strict config building: round trips, overrides and every message a user can meet."""

import dataclasses
import json
import subprocess
import sys
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2 import config as c2_config
from c2.config import (
    ConfigError,
    differences,
    from_dict,
    identity,
    located,
    override,
    runtime,
    to_dict,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    hidden: int = 128
    heads: int = 4
    kind: Literal["mla", "gqa"] = "mla"

    def __post_init__(self):
        if self.hidden % self.heads:
            raise ConfigError(f"heads: {self.heads} does not divide hidden ({self.hidden})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    steps: int
    rate: float = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    depth: int = 1
    model: Model = dataclasses.field(default_factory=lambda: Model(hidden=64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "run"
    model: Model = Model()
    phases: tuple[Phase, ...] = (Phase(steps=5), Phase(steps=7, rate=0.5))
    seeds: tuple[int, ...] = (0,)
    betas: tuple[float, float] = (0.9, 0.95)
    sources: dict[str, float] = dataclasses.field(default_factory=lambda: {"stdlib": 1.0})
    clip: float | None = 1.0
    extra: Extra | None = None
    corpus: str | None = None
    remat: bool = False
    log_every: int = runtime(10)
    hosts: tuple[str, ...] = runtime(default_factory=lambda: ("a",))

    def __post_init__(self):
        if sum(phase.steps for phase in self.phases) > 1000:
            raise ConfigError("phases: more than 1000 steps;\nlegal: fewer")
        if self.name == "bad":
            raise ValueError("the whole does not fit")


configs = st.builds(
    Config,
    name=st.text(max_size=8).filter(lambda name: name != "bad"),
    model=st.builds(
        Model,
        heads=st.just(2),
        hidden=st.integers(1, 99).map(lambda n: 2 * n),
        kind=st.sampled_from(["mla", "gqa"]),
    ),
    phases=st.lists(
        st.builds(Phase, steps=st.integers(0, 99), rate=st.floats(allow_nan=False)), max_size=3
    ).map(tuple),
    seeds=st.lists(st.integers(), max_size=3).map(tuple),
    sources=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    clip=st.none() | st.floats(allow_nan=False),
    extra=st.none() | st.builds(Extra, depth=st.integers()),
    corpus=st.none() | st.text(max_size=5),
    remat=st.booleans(),
    log_every=st.integers(),
)


@settings(max_examples=50, deadline=None)
@given(configs)
def test_json_round_trip(cfg):
    text = json.dumps(to_dict(cfg), allow_nan=False)
    assert from_dict(Config, json.loads(text)) == cfg
    assert override(cfg, []) == cfg


@settings(max_examples=50, deadline=None)
@given(old=configs, new=configs)
def test_every_leaf_can_be_overridden_from_the_command_line(old, new):
    def words(value, path):
        if isinstance(value, dict) and path.count(".") < 1 and path not in ("sources", "extra"):
            return [w for k, v in value.items() for w in words(v, f"{path}.{k}" if path else k)]
        text = value if isinstance(value, str) else json.dumps(value)
        return [f"{path}={text}"]

    # "none" for a str | None means None; there is no other word that a str cannot hold.
    if new.corpus is not None and new.corpus.lower() in ("none", "null"):
        return
    assert override(old, words(to_dict(new), "")) == new


def test_nan_survives_and_is_no_difference():
    cfg = Config(clip=float("nan"))
    data = json.loads(json.dumps(to_dict(cfg), allow_nan=False))
    assert data["clip"] == "nan"
    assert differences(data, to_dict(from_dict(Config, data))) == []


@pytest.mark.parametrize(
    ("assignment", "read", "expected"),
    [
        ("model.hidden=256", lambda c: c.model.hidden, 256),
        ("model.kind=gqa", lambda c: c.model.kind, "gqa"),
        ('model={"hidden": 8}', lambda c: c.model, Model(hidden=8)),
        ("phases.0.steps=10", lambda c: c.phases[0], Phase(steps=10)),
        ("phases.1.steps=10", lambda c: c.phases[1], Phase(steps=10, rate=0.5)),
        ('phases=[{"steps": 3}]', lambda c: c.phases, (Phase(steps=3),)),
        ("seeds=(1, 2)", lambda c: c.seeds, (1, 2)),
        ("seeds=[]", lambda c: c.seeds, ()),
        ("betas.1=0.99", lambda c: c.betas, (0.9, 0.99)),
        ("betas=[0, 1]", lambda c: c.betas, (0.0, 1.0)),
        ("sources.numpy=2", lambda c: c.sources, {"stdlib": 1.0, "numpy": 2.0}),
        ("sources={'numpy': 2}", lambda c: c.sources, {"numpy": 2.0}),
        ("clip=none", lambda c: c.clip, None),
        ("clip=3", lambda c: c.clip, 3.0),
        ("clip=inf", lambda c: c.clip, float("inf")),
        ("corpus=null", lambda c: c.corpus, None),
        ("corpus=a=b", lambda c: c.corpus, "a=b"),
        ("corpus=", lambda c: c.corpus, ""),
        ("name=none", lambda c: c.name, "none"),
        ("remat=True", lambda c: c.remat, True),
        ("extra.depth=2", lambda c: c.extra, Extra(depth=2)),
        ("extra.model.heads=2", lambda c: c.extra.model, Model(hidden=64, heads=2)),
        ('extra={"model": {"heads": 2}}', lambda c: c.extra.model, Model(hidden=64, heads=2)),
    ],
)
def test_override(assignment, read, expected):
    found = read(override(Config(), [assignment]))
    assert found == expected
    assert type(found) is type(expected)


def test_cross_field_checks_see_all_overrides_at_once():
    cfg = override(Config(), ["model.heads=6", "model.hidden=96"])
    assert cfg.model == Model(heads=6, hidden=96)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "model.hiden=1",
            "config.model.hiden: unknown key; did you mean 'hidden'? legal keys: hidden, heads,"
            " kind",
        ),
        ("phases.2.steps=1", "config.phases.2: no such item; config.phases has 2, counted from 0"),
        (
            "phases.-1.steps=1",
            "config.phases.-1: no such item; config.phases has 2, counted from 0",
        ),
        ("phases.0.step=1", "config.phases.0.step: unknown key; did you mean 'steps'?"),
        ("name.x=1", "config.name.x: unknown key; config.name is str and has no keys"),
        ("model.hidden=ten", "config.model.hidden: expected int, got 'ten'"),
        ("model.hidden=1.0", "config.model.hidden: expected int, got '1.0'"),
        ("clip=much", "config.clip: expected float, or none, got 'much'"),
        ("remat=1", "config.remat: expected true or false, got '1'"),
        ("seeds=3", "config.seeds: expected a list [..] of int, got 3"),
        ("seeds=[true]", "config.seeds.0: expected int, got True"),
        ("seeds=[1,", "config.seeds: expected a list [..] of int, got '[1,'"),
        ("betas=[1]", "config.betas: expected a list [float, float], got 1 items"),
        ("sources={1: 2}", "config.sources, a key: expected str, got 1"),
        ("sources.a.b=2", "config.sources.a.b: unknown key; config.sources.a is float"),
        ("model=big", "config.model: expected an object with the keys hidden, heads, kind, got"),
        (
            "model.kind=mia",
            "config.model.kind: 'mia' is not legal; did you mean 'mla'? expected one of mla, gqa",
        ),
        ("phases=[{}]", "config.phases.0.steps: missing; expected int"),
        ("name", "config.name: no value; write name=VALUE"),
        ("model.heads=3", "config.model.heads: 3 does not divide hidden (128)"),
        ("phases.0.steps=999", "config.phases: more than 1000 steps; legal: fewer"),
        ("name=bad", "config: the whole does not fit"),
        ("a\nb=1", "config.a b: unknown key; legal keys: name,"),
    ],
)
def test_bad_override_is_one_line_that_names_the_key(assignment, message):
    with pytest.raises(ConfigError) as caught:
        override(Config(), [assignment])
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "config: expected an object with the keys name, model,"),
        ({"modle": {}}, "config.modle: unknown key; did you mean 'model'?"),
        ({"phases": [{"rate": 1.0}]}, "config.phases.0.steps: missing; expected int"),
        ({"model": None}, "config.model: expected an object"),
        ({"model": {"hidden": True}}, "config.model.hidden: expected int, got True"),
        ({"name": 3}, "config.name: expected str, got 3"),
        ({"clip": "3"}, "config.clip: expected float, or none, got '3'"),
        ({"name": 10**100}, "config.name: expected str, got 1000000"),
    ],
)
def test_bad_data(data, message):
    with pytest.raises(ConfigError) as caught:
        from_dict(Config, data)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("heads: 3 is odd", "config.model.heads: 3 is odd"),
        ("heads must be even, got 3", "config.model.heads must be even, got 3"),
        ("heads.first, hidden: 3, 4", "config.model.heads.first, hidden: 3, 4"),
        ("head count is odd", "config.model: head count is odd"),
        ("(3)", "config.model: (3)"),
    ],
)
def test_a_check_that_starts_with_a_key_gets_the_path(message, shown):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Checked:
        heads: int = 3
        hidden: int = 4

        def __post_init__(self):
            raise ConfigError(message)

    with pytest.raises(ConfigError) as caught:
        from_dict(Checked, {}, where="config.model")
    assert str(caught.value) == shown


def test_located():
    with pytest.raises(ConfigError) as caught, located("config"), located("data"):
        raise ConfigError("sources: is empty")
    assert str(caught.value) == "config.data.sources: is empty"
    with pytest.raises(ValueError, match=r"^not ours$"), located("config"):
        raise ValueError("not ours")


def test_where_names_the_source():
    with pytest.raises(ConfigError, match=r"^a/config.json: config.model.heads: 3 does not"):
        from_dict(Config, {"model": {"heads": 3}}, where="a/config.json: config")


def test_unsupported_field_type_is_a_programming_error():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Odd:
        either: int | str = 1

    with pytest.raises(TypeError, match="not supported"):
        from_dict(Odd, {"either": 1})
    with pytest.raises(TypeError, match="cannot hold"):
        to_dict(Config(name=b"bytes"))


def test_identity_leaves_runtime_fields_out():
    old, new = Config(), Config(log_every=1, hosts=("b",))
    assert identity(old) == identity(new)
    assert to_dict(old) != to_dict(new)
    assert c2_config.runtime_keys(old) == ["log_every", "hosts"]


def test_differences():
    old = Config()
    new = override(old, ["model.hidden=256", "phases.1.steps=8", "corpus=x", "seeds=[1]"])
    assert differences(to_dict(old), to_dict(new)) == [
        "model.hidden: 128 -> 256",
        "phases.1.steps: 7 -> 8",
        "seeds: [0] -> [1]",
        'corpus: null -> "x"',
    ]
    shorter = override(old, ['phases=[{"steps": 5}]'])
    assert differences(to_dict(old), to_dict(shorter)) == [
        "phases.1.steps: 7 -> (absent)",
        "phases.1.rate: 0.5 -> (absent)",
    ]


def test_config_needs_no_jax():
    code = "import sys, c2.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    kind: Literal["latent"] = "latent"
    heads: int = 2
    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped:
    kind: Literal["grouped"] = "grouped"
    heads: int = 2
    groups: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Either:
    attention: Latent | Grouped = Latent(rank=4)
    second: Latent | Grouped | None = None


def test_a_union_is_told_apart_by_kind():
    for cfg in (Either(), Either(attention=Grouped(groups=2), second=Latent(heads=1, rank=1))):
        assert from_dict(Either, json.loads(json.dumps(to_dict(cfg)))) == cfg


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["attention.rank=8"], Either(attention=Latent(rank=8))),
        (['attention={"rank": 8}'], Either(attention=Latent(rank=8))),
        # another kind starts from its own defaults: nothing of the old one applies
        (['attention={"kind": "grouped", "groups": 2}'], Either(attention=Grouped(groups=2))),
        (['second={"kind": "grouped"}', "second.heads=5"], Either(second=Grouped(heads=5))),
        (["second=none"], Either()),
    ],
)
def test_overrides_of_a_union(words, expected):
    assert override(Either(attention=Latent(rank=4)), words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attention.kind=grouped"], "config.attention.rank: unknown key; legal keys: kind, heads"),
        (["attention.kind=x"], "config.attention.kind: expected one of latent, grouped, got 'x'"),
        (["second.heads=3"], "config.second.kind: expected one of latent, grouped, got None"),
        (["second=3"], "config.second: expected an object with the keys kind, heads, rank or an"),
        (['second={"heads": 3}'], "config.second.kind: expected one of latent, grouped, got None"),
    ],
)
def test_errors_of_a_union(words, message):
    with pytest.raises(ConfigError) as caught:
        override(Either(), words)
    assert str(caught.value).startswith(message)
