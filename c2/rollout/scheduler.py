"""Continuous batching: which request is in which slot, and what the device does next.

One thread owns a scheduler. A round is: requests that wait take free slots; every sequence with
unread tokens reads one chunk; all others decode for some steps. So a long prompt holds running
sequences up for one chunk at a time. Between two rounds requests come and go and weights change.

    waiting -> reading -> decoding -> ended, with a completion
       |          |  ^       |
       |          |  +-------+  new weights, if caches are recomputed
       +----------+----------+--> ended without one: cancelled
"""

import time
from collections import deque
from typing import Any

import numpy as np

from c2.config import ConfigError
from c2.records import Completion
from c2.rollout.config import EngineConfig, Request, check
from c2.rollout.device import Device, blank_chunk, blank_slots
from c2.rollout.payoff import Payoff
from c2.rollout.prefixes import Prefixes, common
from c2.rollout.sequence import Emit, Sequence


class Scheduler:
    """Runs requests on a device."""

    def __init__(self, device: Device, engine: EngineConfig, vocab: int, version: int = 0) -> None:
        """Starts without requests.

        Args:
          device: anything with the methods of `c2.rollout.device.Device`.
          engine: engine configuration.
          vocab: size of the vocabulary.
          version: policy version of the device's parameters.
        """
        self.version = version
        self.pause_s = 0.0  # see `update`
        self._device, self._engine, self._vocab = device, engine, vocab
        self._waiting: deque[Sequence] = deque()
        self._slots: list[Sequence | None] = [None] * engine.slots
        self._prefixes = Prefixes(engine.prefix_entries)
        self._payoff = Payoff(*device.step_seconds()) if engine.speculate else None
        self._recomputing: tuple[float, list[Sequence]] = (0.0, [])
        self._counts = dict.fromkeys(("prompt_tokens", "prefix_tokens", "tokens", "ended"), 0)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have a slot."""
        return [s for s in self._slots if s is not None]

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self.running

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and how things stand.

        ``prefix_tokens`` are prompt tokens that did not have to be read. ``pause_s`` is how long
        the newest weights held up sequences that were being decoded.
        """
        metrics = self._counts | {
            "waiting": len(self._waiting),
            "running": len(self.running),
            "version": self.version,
            "pause_s": self.pause_s,
            "compilations": self._device.compilations,
        }
        if self._payoff:
            metrics |= {"acceptance": self._payoff.acceptance, "speculates": self._payoff.pays}
        return metrics

    def submit(self, request: Request, emit: Emit) -> Sequence:
        """Queues a request.

        Raises:
          ConfigError: if the engine cannot do it.
        """
        check(request, self._engine, self._vocab)
        sequence = Sequence(request, emit, list(request.prompt))
        self._waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence without a completion, unless it has ended."""
        if not sequence.ended:
            if sequence.slot < 0:
                self._waiting.remove(sequence)
            self._end(sequence)

    def update(self, params: Any, version: int) -> None:
        """Goes on with other weights, placed by the device, from the next token on.

        Every sequence keeps its tokens, budget and place. Its cache is kept, or read again, as
        configured; nothing else is ever computed from older weights.

        Raises:
          ConfigError: if the version is not a later one.
        """
        if version <= self.version:
            raise ConfigError(f"version: {version}; legal: above the engine's {self.version}")
        began = time.perf_counter()
        self._device.swap(params)
        self.version = version
        self._prefixes.clear()
        if self._payoff:
            self._payoff.reset()
        decoding = [s for s in self.running if not s.unread]
        if self._engine.after_update == "recompute":
            for sequence in self.running:
                sequence.forget()
            if not self._recomputing[1]:  # else those still wait since the update before
                self._recomputing = (began, decoding)
        self.pause_s = time.perf_counter() - began

    def round(self) -> None:
        """Does what comes next; returns when it is done."""
        self._admit()
        reading = [s for s in self.running if s.unread]
        for i in range(0, len(reading), self._engine.prefill_rows):
            self._read(reading[i : i + self._engine.prefill_rows])
        began, recomputing = self._recomputing
        if recomputing and not any(s.unread for s in recomputing if not s.ended):
            self.pause_s = time.perf_counter() - began
            self._recomputing = (0.0, [])
        if decoding := [s for s in self.running if not s.unread]:
            self._decode(decoding)

    def _admit(self) -> None:
        free = [i for i, s in enumerate(self._slots) if s is None]
        passed: list[Sequence] = []
        while free and self._waiting:
            sequence = self._waiting.popleft()
            entry, length = self._prefix(sequence)
            if self._will_be_kept(sequence, length):
                passed.append(sequence)
                continue
            sequence.slot = free.pop(0)
            self._slots[sequence.slot] = sequence
            self._counts["prompt_tokens"] += len(sequence.request.prompt)
            if length:
                self._device.take(entry, sequence.slot)
                sequence.first_version = self.version
                sequence.read(length, self._prefixes.use(entry, length))
                self._counts["prefix_tokens"] += length
        self._waiting.extendleft(reversed(passed))

    def _prefix(self, sequence: Sequence) -> tuple[int, int]:
        """The kept sequence to start from, and for how many tokens; 0 if it saves no dispatch."""
        entry, length = self._prefixes.find(np.asarray(sequence.known[:-1], np.int32))
        saves = self._chunks(sequence.unread - length) < self._chunks(sequence.unread)
        return (entry, length) if saves else (-1, 0)

    def _will_be_kept(self, sequence: Sequence, length: int) -> bool:
        """Whether a prompt that is being read will soon save this one more than is kept now."""
        if not self._engine.prefix_entries:
            return False
        wanted = np.asarray(sequence.known[:-1], np.int32)
        soon = (common(np.asarray(s.known[:-1], np.int32), wanted) for s in self._reading_anew())
        longest = max(soon, default=0)
        return self._chunks(len(wanted) - longest) < self._chunks(len(wanted) - length)

    def _reading_anew(self) -> list[Sequence]:
        """Sequences whose caches will be of the newest version when they have been read."""
        return [s for s in self.running if s.unread and s.first_version in (-1, self.version)]

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self._engine.prefill_chunk)

    def _read(self, rows: list[Sequence]) -> None:
        chunk, size = blank_chunk(self._engine), self._engine.prefill_chunk
        for i, sequence in enumerate(rows):
            begin, count = sequence.cached, min(sequence.unread, size)
            known = sequence.known[begin : begin + count + 1]
            chunk.slot[i], chunk.length[i], chunk.count[i] = sequence.slot, begin, count
            chunk.tokens[i, :count], chunk.following[i, :count] = known[:-1], known[1:]
        routes = self._device.prefill(chunk)
        for i, sequence in enumerate(rows):
            self._note_version(sequence)
            sequence.read(chunk.count[i], routes[i])
            if not sequence.unread:
                self._keep(sequence)

    def _note_version(self, sequence: Sequence) -> None:
        """To be called before the device computes the sequence's next entries."""
        if not sequence.cached:
            sequence.first_version = self.version

    def _keep(self, sequence: Sequence) -> None:
        """Keeps a sequence's cache if all of it comes from the newest weights."""
        if self._engine.prefix_entries and sequence.computed_by(self.version):
            tokens = np.asarray(sequence.known[: sequence.cached], np.int32)
            entry = self._prefixes.add(tokens, sequence.cached_routes())
            if entry is not None:
                self._device.keep(sequence.slot, entry)

    def _decode(self, decoding: list[Sequence]) -> None:
        slots = blank_slots(self._engine)
        for sequence in decoding:
            self._note_version(sequence)
            fill(slots, sequence)
        speculate = self._payoff is not None and self._payoff.pays
        emitted = self._device.decode(slots, speculate=speculate)
        if speculate:
            self._payoff.observe(int(emitted.drafted.sum()), int(emitted.accepted.sum()))
        for sequence in decoding:
            sequence.drafting &= speculate
            sequence.has_draft = sequence.drafting
            tokens = emitted.tokens[:, sequence.slot].reshape(-1)
            there = tokens >= 0
            log_probs = emitted.log_probs[:, sequence.slot].reshape(-1)[there]
            routes = emitted.routes[:, sequence.slot].reshape(
                len(tokens), *emitted.routes.shape[3:]
            )
            new = sequence.write(
                tokens[there].tolist(), log_probs.tolist(), routes[there], self.version
            )
            self._counts["tokens"] += len(new)
            sequence.emit(new)
            if sequence.finish:
                self._keep(sequence)
                self._end(sequence)
                sequence.emit(sequence.completion())

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        self._counts["ended"] += 1
        if sequence.slot >= 0:
            self._slots[sequence.slot] = None


def fill(slots: Any, sequence: Sequence) -> None:
    """Tells the device what the host knows of a sequence."""
    i, request = sequence.slot, sequence.request
    slots.live[i] = True
    slots.last[i], slots.length[i] = sequence.known[-1], sequence.cached
    slots.count[i], slots.budget[i] = sequence.count, request.max_tokens
    slots.stop[i, : len(request.stop)] = request.stop
    slots.seed[i], slots.request[i] = request.seed, request.id
    slots.temperature[i] = request.temperature or 1.0
    if request.forced:
        ahead = range(sequence.count, sequence.count + slots.forced.shape[1])
        slots.forced[i] = [request.forced.get(place, -1) for place in ahead]
    if slots.top_k is not None:
        unlimited = np.iinfo(np.int32).max
        greedy = request.temperature == 0
        slots.top_k[i] = 1 if greedy else request.top_k or unlimited
        slots.top_p[i] = request.top_p
    if slots.drafts is not None:
        slots.drafts[i], slots.has_draft[i] = sequence.drafting, sequence.has_draft


def run(scheduler: Scheduler, requests: list[Request]) -> list[Completion]:
    """Runs requests to their ends in this thread; completions come in the order of requests."""
    completions: list[Completion | None] = [None] * len(requests)

    def receive(i: int) -> Emit:
        def emit(event):
            if isinstance(event, Completion):
                completions[i] = event

        return emit

    for i, request in enumerate(requests):
        scheduler.submit(request, receive(i))
    while not scheduler.idle:
        scheduler.round()
    return completions
