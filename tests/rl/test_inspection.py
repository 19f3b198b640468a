"""What is written of a step is found again by what was sampled."""

import dataclasses

import numpy as np

from c2.rl import simulated
from c2.rl.inspection import Inspection, save
from c2.rl.rows import Row, pack


def test_every_generation_finds_its_own_tokens(tmp_path):
    links = [simulated.rollout("t", i, (0,)).generations[0] for i in range(5)]
    links = [
        dataclasses.replace(link, **{k: v[: 20 + 3 * i] for k, v in vars(link).items()})
        for i, link in enumerate(links)
    ]
    rows = [
        Row(
            rollout=i,
            tokens=link.tokens,
            weights=link.loss_mask.astype(float),
            advantages=np.zeros(len(link.tokens)),
            log_probs=link.log_probs,
            temperatures=link.temperatures,
            routes=link.routes,
        )
        for i, link in enumerate(links)
    ]
    packed = pack(rows, 64)
    # the log-probability of a target says which token it is, and stands where that is predicted
    log_probs = packed.batch["targets"].astype(np.float32)
    save(tmp_path / "deep" / "7", rows, packed, log_probs, packed.batch["tokens"] % 2 == 1)
    found = Inspection(tmp_path / "deep" / "7")
    for link in links:
        log_probs, replaced = found.of(link)
        np.testing.assert_array_equal(log_probs[1:], link.tokens[1:])
        np.testing.assert_array_equal(replaced, link.tokens % 2 == 1)
    assert found.of(simulated.rollout("t", 9, (0,)).generations[0]) is None
