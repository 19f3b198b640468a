"""What an agent is asked for: short, in several wordings, and never the change itself."""

import random

_WORDINGS = {
    "feature": (
        "implement {names}", "write {names}", "{names} is missing", "{names} has no body",
        "finish {names}",
    ),
    "rename": (
        "rename {renames}", "call {renames} everywhere", "new name: {renames}",
    ),
    "config": (
        "settings do not fit the README", "wrong setting for {symptom}", "config of {symptom}",
        "{symptom} is wrong, see README.md", "{example}",
    ),
    "other": (
        "fix {symptom}", "{symptom} is wrong", "bug in {symptom}", "{symptom} is broken",
        "{example}", "a test of {symptom} fails",
    ),
}  # fmt: skip


def write(
    rng: random.Random,
    family: str,
    *,
    names: str,
    renames: str,
    symptom: str,
    place: str,
    example: str,
) -> str:
    """A prompt of one line.

    Args:
      rng: draws the wording.
      family: of the task.
      names: functions to be written.
      renames: "OLD to NEW".
      symptom: the function that is seen to be wrong.
      place: its file, which goes in front of some prompts.
      example: "CALL gives X, want Y" or "CALL fails: ERROR".
    """  # fmt: skip
    wordings = _WORDINGS.get(family, _WORDINGS["other"])
    text = rng.choice(wordings).format(
        names=names, renames=renames, symptom=symptom, example=example
    )
    return f"{place}: {text}" if family != "rename" and rng.random() < 0.5 else text
