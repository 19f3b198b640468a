"""Initial values: seeded by name, spread by fan-in."""

import jax
import numpy as np
import pytest

from c2 import models
from c2.models.params import ParamSpec, init, size, stack, trainable_mask

KEY = jax.random.key(7)


def test_a_new_parameter_does_not_reseed_the_others():
    def spec(*shape):
        return ParamSpec(shape, ("a",) * len(shape), fan_in=4)

    few = init(KEY, {"b": spec(4, 3), "inner": {"c": spec(5)}})
    many = init(KEY, {"a": spec(5), "b": spec(4, 3), "inner": {"a": spec(5), "c": spec(5)}})
    np.testing.assert_array_equal(few["b"], many["b"])
    np.testing.assert_array_equal(few["inner"]["c"], many["inner"]["c"])


def test_tensors_and_layers_and_keys_differ():
    table = stack({name: ParamSpec((50,), ("a",)) for name in "bcd"}, 2)
    drawn = [*init(KEY, table).values(), *init(jax.random.key(8), table).values()]
    rows = np.concatenate(drawn)
    assert rows.shape == (12, 50)
    off_diagonal = np.corrcoef(rows)[~np.eye(12, dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.6  # 1 for a repeated draw; 4.2 standard errors


def test_spread_follows_fan_in_and_gain():
    table = {
        "w": ParamSpec((100, 200), ("a", "b"), fan_in=100, gain=3.0),
        "one": ParamSpec((5,), ("a",), init="ones"),
        "zero": ParamSpec((5,), ("a",), init="zeros", dtype=np.float16, trainable=False),
    }
    values = init(KEY, table)
    assert values["w"].std() == pytest.approx(0.3, rel=0.02)  # 4 standard errors
    assert abs(values["w"].mean()) < 0.01
    assert (values["one"] == 1).all()
    assert (values["zero"] == 0).all() and values["zero"].dtype == np.float16
    assert trainable_mask(table) == {"w": True, "one": True, "zero": False}
    assert size(table) == 20_005


def test_abstract_describes_what_init_makes(tiny_config):
    made = jax.eval_shape(lambda: models.init(KEY, tiny_config))
    assert models.abstract(tiny_config) == made


def test_axes_name_every_dimension(tiny_config):
    with pytest.raises(ValueError, match="differ in length"):
        ParamSpec((2, 3), ("a",))
    for path, spec in jax.tree_util.tree_leaves_with_path(models.spec(tiny_config)):
        stacked = jax.tree_util.keystr(path).startswith((".dense", ".moe"))
        assert (spec.axes[0] == "layer") == stacked
