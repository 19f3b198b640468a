"""Records in the format of SWE-bench, and the logs of the test programs that it uses."""

from c2.sandbox.tasks.swebench.logs import FORMATS, LANGUAGES, parse
from c2.sandbox.tasks.swebench.records import Record, candidate, read, unresolved

__all__ = ["FORMATS", "LANGUAGES", "Record", "candidate", "parse", "read", "unresolved"]
