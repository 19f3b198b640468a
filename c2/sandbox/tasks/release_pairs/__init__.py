"""Tasks made of two releases of a project: the code of one, the tests of the next.

The change log is the prompt. Nothing of the projects is kept here: a recipe names two source
distributions by their digest and, since the gates have been run, the tests that decide.
"""

from c2.sandbox.tasks.release_pairs.recipe import (
    Recipe,
    build,
    candidate,
    found,
    read,
    recipes,
    requires,
    write,
)

__all__ = ["Recipe", "build", "candidate", "found", "read", "recipes", "requires", "write"]
