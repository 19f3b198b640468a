"""One running request, as the host sees it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from c2.records import NO_ROUTE, Completion
from c2.rollout.config import Request


class Token(NamedTuple):
    """One token of a completion, as it is streamed; see `c2.records.Completion`."""

    id: int
    log_prob: float
    version: int
    forced: bool


# called with tokens as they come, and last with the completion
Emit = Callable[[list[Token] | Completion], None]


@dataclass(eq=False)
class Sequence:
    """A request with what is known of it; the invariant is cached <= len(known) - 1.

    The newest token is never in the cache: feeding it gives the logits of the next one.

    Attributes:
      request: what was asked for.
      emit: who asked.
      known: prompt and completion so far.
      slot: where its cache is, -1 for none.
      cached: tokens in the cache.
      first_version: policy version that computed the cache's first entry. Later entries are of
        the same or later versions, so all are of the newest if this one is.
      routes: of the first ``routed`` tokens, in pieces.
      routed: tokens whose routes are known. They stay what they were when the cache is recomputed:
        these are the routes that the recorded log-probabilities came from.
      drafting: the prediction module's cache is as long as the model's.
      has_draft: the device holds a draft of the next token but one.
    """

    request: Request
    emit: Emit
    known: list[int]
    slot: int = -1
    cached: int = 0
    first_version: int = -1
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    routed: int = 0
    drafting: bool = True
    has_draft: bool = False
    ended: bool = False

    @property
    def count(self) -> int:
        """Completion tokens so far."""
        return len(self.known) - len(self.request.prompt)

    @property
    def unread(self) -> int:
        """Tokens to be read into the cache before decoding can go on."""
        return len(self.known) - 1 - self.cached

    @property
    def finish(self) -> str | None:
        """What has ended the completion, if something has."""
        if self.count and self.known[-1] in self.request.stop:
            return "stop"
        return "length" if self.count == self.request.max_tokens else None

    def read(self, tokens: int, routes: np.ndarray) -> None:
        """Takes note of tokens that have gone into the cache, with their routes [token, ...]."""
        new = routes[max(self.routed - self.cached, 0) : tokens]
        self.cached += tokens
        if len(new):
            self.routes.append(np.array(new))
            self.routed += len(new)

    def write(
        self, ids: list[int], log_probs: list[float], routes: np.ndarray, version: int
    ) -> list[Token]:
        """Takes note of new tokens, and of the routes of those before them, which were fed."""
        self.read(len(ids), routes)
        places = range(self.count, self.count + len(ids))
        self.known += ids
        self.log_probs += log_probs
        self.versions += [version] * len(ids)
        forced = (place in self.request.forced for place in places)
        return [Token(*t) for t in zip(ids, log_probs, [version] * len(ids), forced, strict=True)]

    def forget(self) -> None:
        """The cache has to be filled again."""
        self.cached, self.first_version, self.drafting, self.has_draft = 0, -1, True, False
        if not self.count:
            self.routes, self.routed = [], 0

    def computed_by(self, version: int) -> bool:
        """Whether one version computed all of the cache, and the recorded routes with it."""
        return {self.first_version, *self.versions[:1]} == {version}

    def cached_routes(self) -> np.ndarray:
        """Routes of the tokens in the cache, [token, moe_layer, top_k]."""
        return np.concatenate(self.routes)[: self.cached]

    def completion(self) -> Completion:
        """The record of a sequence that has ended."""
        routes = np.concatenate(self.routes)
        missing = [(0, len(self.known) - len(routes)), (0, 0), (0, 0)]
        prompt = len(self.request.prompt)
        return Completion(
            prompt=np.asarray(self.known[:prompt], np.int32),
            tokens=np.asarray(self.known[prompt:], np.int32),
            log_probs=np.asarray(self.log_probs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            forced=np.isin(np.arange(self.count), list(self.request.forced)),
            routes=np.pad(routes, missing, constant_values=NO_ROUTE),
            temperature=self.request.temperature,
            finish=self.finish,
        )
