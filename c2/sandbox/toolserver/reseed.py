"""For programs inside a sandbox that may be copied while they run.

A copy has the memory of the original, so what a program draws its random numbers from would go on
alike in all copies. The tool server sends SIGURG to every process of a copy.
"""

import os
import random
import signal
import sys


def reseed_when_copied():
    """From now on a copy of this program seeds `random`, numpy's old generator and OpenSSL anew.

    To be called in the main thread. Objects of `numpy.random.Generator` are the program's own.
    """
    signal.signal(signal.SIGURG, _reseed)


def _reseed(*_):
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_add(os.urandom(64), 64.0)
