"""Sandboxes of several nodes, lent to owners: leases, quotas, admission, warm ones, accounting.

`ledger` says what the life of a sandbox is, `core` decides (a state machine without clocks, files
or processes), `pressure` measures the machine, `log` remembers, `engine` and `keeper` do it, and
`Pool` is what others see.
"""

from c2.sandbox.pool.config import PoolConfig
from c2.sandbox.pool.core import Limits
from c2.sandbox.pool.pool import Pool

__all__ = ["Limits", "Pool", "PoolConfig"]
