"""The end of all that commands have left running in a sandbox."""

import time

from c2.sandbox.protocol import Handle, SandboxError, SupportsJobs

END_S = 10.0
LOOK_S = 0.01


def end_all(backend: SupportsJobs, handle: Handle) -> None:
    """Kills all jobs, also those that take no notice of SIGTERM, and waits until they are gone.

    Raises:
      SandboxError: if some do not end.
    """
    for number in backend.jobs(handle):
        backend.kill(handle, number)
    patience = time.monotonic() + END_S
    while backend.jobs(handle):
        if time.monotonic() > patience:
            raise SandboxError(f"sandbox {handle.id}: its jobs do not end")
        time.sleep(LOOK_S)
