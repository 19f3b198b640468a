"""How the setting of replay reaches the mixture function."""

import pytest

from c2.config import ConfigError
from c2.rl.replay import ReplayConfig


def mixture(x, p, real, routes, cfg, *, slack=None):
    return x, p, real, routes, cfg, slack


@pytest.mark.parametrize(
    ("config", "routes", "slack"),
    [
        (ReplayConfig(mode="none"), None, None),
        (ReplayConfig(mode="strict", slack=0.5), "routes", None),
        (ReplayConfig(mode="filter", slack=0.5), "routes", 0.5),
        (ReplayConfig(mode="filter", slack=0.0), "routes", 0.0),
    ],
)
def test_what_the_mixture_is_given(config, routes, slack):
    got = config.experts(mixture)("x", "p", "real", "routes", "cfg")
    assert got == ("x", "p", "real", routes, "cfg", slack)


def test_bad_slack():
    for slack in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="slack"):
            ReplayConfig(slack=slack)
