"""What a policy sees of its tasks before anything is rewarded: code like theirs, scripted agents.

Code goes into the corpus, so that it is tokenised in few tokens and nothing of it is new later;
demonstrations are conversations to fine-tune on.
"""

import random
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from c2.agent.agents import Script
from c2.agent.demonstrations import demonstrate
from c2.config import ConfigError
from c2.data import store
from c2.data.files import atomic
from c2.data.store import TokenStore
from c2.data.tokenizer import Tokenizer
from c2.rl.environments import EnvironmentConfig
from c2.sandbox.tasks import minirepo
from c2.sandbox.tasks.minirepo import policies
from c2.sandbox.tasks.task import Task

PER_FILE = 60  # generated packages in a file


@dataclass(frozen=True, kw_only=True)
class DemonstrationsConfig:
    """What is shown.

    The agent could solve everything, but makes mistakes, does not always look at the tests, and may
    give up when they fail: a policy that has learned from it can do more than it is used to do.

    Attributes:
      count: conversations.
      level: of the tasks, see `c2.sandbox.tasks.minirepo`.
      families: kinds of tasks; a kind that is left out is for rewards to teach.
      slips: how often its first edit is wrong, 0 to 1.
      test_before: how often it runs the tests before it edits.
      test_after: how often it runs them after.
      repairs: how often it repairs a mistake that they have shown.
      together: how often it makes calls in one turn that need not wait for each other.
      others: what tokens that the agent did not write count; its own count 1.
      seed: of tasks and habits.
    """

    count: int = 4000
    level: int = 1
    families: tuple[str, ...] = minirepo.FAMILIES
    slips: float = 0.6
    test_before: float = 0.1
    test_after: float = 0.6
    repairs: float = 0.5
    together: float = 0.0
    others: float = 0.1
    seed: int = 0

    def __post_init__(self):
        if self.count < 1:
            raise ConfigError(f"count: {self.count}; legal: at least 1")
        for name in ("slips", "test_before", "test_after", "repairs", "together", "others"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal: 0 to 1")
        if unknown := [name for name in self.families if name not in minirepo.FAMILIES]:
            raise ConfigError(f"families: {unknown[0]!r}; legal: {', '.join(minirepo.FAMILIES)}")
        if not self.families:
            raise ConfigError(f"families: none; legal: {', '.join(minirepo.FAMILIES)}")


def write_packages(path: Path, count: int) -> None:
    """Writes generated packages without faults, as a source of documents: a zip archive.

    A text before each file says how an agent would look at it and change it, so that such calls are
    tokenised in few tokens, too. Many packages share a file, as short ones would be taken for near
    duplicates of each other.
    """
    with atomic(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for first in range(0, count, PER_FILE):
            found = [minirepo.sound(seed) for seed in range(first, min(first + PER_FILE, count))]
            text = "\n".join(
                f'"""\nread_file {name}\nedit_lines {name}\nrun_tests\n"""\n{code}'
                for files in found
                for name, code in files.items()
                if code
            )
            archive.writestr(zipfile.ZipInfo(f"packages/{first:06d}.py"), text)


def cached_store(
    config: DemonstrationsConfig,
    tokenizer: Tokenizer,
    environments: EnvironmentConfig,
    cache: Path,
) -> TokenStore:
    """As `make_store`, from the file ``cache`` if it was made from the same settings."""
    mark = _fingerprint(config, tokenizer, environments)
    return store.cached(cache, mark, lambda: make_store(config, tokenizer, environments))


def make_store(
    config: DemonstrationsConfig, tokenizer: Tokenizer, environments: EnvironmentConfig
) -> TokenStore:
    """The demonstrations as documents, with weights of tokens.

    Args:
      config: what is shown.
      tokenizer: of the policy that is to learn.
      environments: whose tools, syntax and budgets are used.
    """
    rng = random.Random(f"demonstrations/{config.seed}")
    tasks = [
        minirepo.draw(rng.getrandbits(40), config.level, families=config.families)
        for _ in range(config.count)
    ]

    def script(task: Task) -> Script:
        policy = policies.careless(
            task,
            rng,
            slips=config.slips,
            tests=config.test_after,
            repairs=config.repairs,
            test_before=rng.random() < config.test_before,
        )
        return policies.together(policy, rng, config.together) if config.together else policy

    links = demonstrate(
        tasks, script, tokenizer, syntax=environments.syntax, tools=environments.tools,
        budgets=environments.harness,
    )  # fmt: skip
    tokens = np.concatenate([link.tokens for link in links]).astype(tokenizer.dtype)
    own = np.concatenate([link.loss_mask for link in links])
    return TokenStore(
        tokens=tokens,
        offsets=np.cumsum([0, *(len(link.tokens) for link in links)], dtype=np.int64),
        prompts=np.zeros(len(links), np.int32),
        sources=np.zeros(len(links), np.int32),
        fingerprint=_fingerprint(config, tokenizer, environments),
        weights=np.where(own, 1, config.others).astype(np.float16),
    )


def _fingerprint(
    config: DemonstrationsConfig, tokenizer: Tokenizer, environments: EnvironmentConfig
) -> str:
    shown = (config, environments.syntax, environments.tools, environments.harness)
    return store.fingerprint((), *shown, tokenizer.to_json())
