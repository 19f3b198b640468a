"""Whether speculative decoding pays: measured, not assumed."""

FORGET = 0.9  # weight of older dispatches in the acceptance rate
ENOUGH = 100  # drafts before a verdict


class Payoff:
    """Compares the tokens that a speculative step gives with the time it takes.

    A step gives 1 + acceptance tokens where a plain one gives 1. It is switched off when that
    does not make up for the slower step, until new weights may have made drafts better.
    """

    def __init__(self, plain_seconds: float, speculative_seconds: float) -> None:
        self._cost = speculative_seconds / plain_seconds
        self.reset()

    def reset(self) -> None:
        """Tries again."""
        self.pays, self._drafted, self._accepted = True, 0.0, 0.0

    @property
    def acceptance(self) -> float:
        """The share of recent drafts that was accepted, nan before there is one."""
        return self._accepted / self._drafted if self._drafted else float("nan")

    def observe(self, drafted: int, accepted: int) -> None:
        """Takes note of one speculative dispatch."""
        self._drafted = FORGET * self._drafted + drafted
        self._accepted = FORGET * self._accepted + accepted
        if self._drafted >= ENOUGH:
            self.pays = 1 + self.acceptance >= self._cost
