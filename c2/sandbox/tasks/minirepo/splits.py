"""Held-out parts: by family, by template, and by combination of family, template and package."""

import hashlib

from c2.sandbox.tasks.task import Task

SPLITS = ("train", "combination", "template", "family")
HELD_FAMILIES = ("arguments",)
HELD_TEMPLATES = ("keep_from", "spread", "lcm", "wheel")
_HELD_COMBINATIONS = 32  # of 256


def split(task: Task) -> str:
    """The one of `SPLITS` that a task belongs to; it depends on `Task.split_keys` alone.

    "family" holds all tasks of `HELD_FAMILIES`, "template" all others about one of
    `HELD_TEMPLATES`, "combination" of the rest an eighth of the combinations. Bystanders and
    callers in the repositories of "train" are of no held-out template either.
    """
    keys = task.split_keys
    if keys["family"] in HELD_FAMILIES:
        return "family"
    if set(keys["template"].split("+")) & set(HELD_TEMPLATES):
        return "template"
    digest = hashlib.sha256(keys["combination"].encode()).digest()
    return "combination" if digest[0] < _HELD_COMBINATIONS else "train"
