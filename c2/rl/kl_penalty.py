"""The KL to the reference policy, in the reward of every token."""

import numpy as np

from c2.data.packing import Batch
from c2.losses import kl
from c2.losses.config import KLConfig
from c2.rl.rows import Packed


def charge(packed: Packed, reference: np.ndarray, config: KLConfig) -> Batch:
    """A batch that knows the reference and, if the KL is in the reward, pays for it.

    Estimates compare the reference with the policy that sampled. On policy, k1 to go makes the
    policy gradient that of the KL of whole rollouts. If the policy that learns has moved on to pi,
    it is that of KL(pi || reference) - KL(pi || sampled from), with exact importance weights: what
    is missing vanishes to second order.

    Args:
      packed: the rows of a step. Rows of one rollout stand together in the order of their chain.
      reference: log-probabilities of the targets under the reference [batch row, token], at the
        temperatures of the batch; what stands where nothing is learned has no effect.
      config: the KL.

    Returns:
      The batch with ``reference`` and lower ``advantages``.
    """
    batch = packed.batch | {"reference": np.asarray(reference, np.float32)}
    if config.placement == "loss":
        return batch
    estimates = kl.estimate(batch["reference"], batch["sampled"], config.estimator)
    price = config.beta * np.where(batch["weights"] > 0, np.asarray(estimates, np.float64), 0)
    advantages = batch["advantages"].astype(np.float64)
    later, behind = 0.0, -1  # what the rest of the chain pays; whose chain it is
    for (row, first, end), rollout in zip(packed.places[::-1], packed.rollouts[::-1], strict=True):
        here = row, slice(first, end - 1)
        if config.horizon == "to_go":
            later = later if rollout == behind else 0.0
            price[here] = np.cumsum(price[here][::-1])[::-1] + later
            later, behind = price[row, first], rollout
        advantages[here] -= price[here]
    return batch | {"advantages": advantages.astype(np.float32)}
