"""Decoding loop over rows at fixed addresses: on CUDA a captured graph per number of rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache

from grpo_nb.config import SamplingConfig
from grpo_nb.rollout import sampling
from grpo_nb.rollout.eager import processors_of
from grpo_nb.rollout.request import Request
from grpo_nb.rollout.static_cache import StaticCache

Forward = Callable[[Tensor, Tensor, StaticCache], Tensor]
"""(tokens, positions, cache) -> scores of the next token, [row, vocab]."""


@dataclass(frozen=True)
class Chunk:
    """Prompts that are sampled from together, and the result of their prefill."""

    first: int
    count: int
    logits: Tensor
    cache: Cache


@dataclass(frozen=True)
class Settings:
    """Part of a request that a graph captures; the temperature too, where other settings shape the distribution."""

    greedy: bool
    plain: bool
    """Whether temperature alone shapes the distribution."""
    sampling: SamplingConfig | None
    temperature: float | None

    @classmethod
    def of(cls, request: Request) -> "Settings":
        given = request.sampling
        plain = not given.changes_policy or (request.greedy and given.repetition_penalty == 1)
        if plain:
            return cls(request.greedy, True, None, None)
        return cls(request.greedy, False, given, request.temperature)


class DecodeLoop:
    """Rows that sample one token each per step; all have sampled the same number of tokens."""

    def __init__(self, device: torch.device, forward: Forward, cache: StaticCache) -> None:
        size = cache.size
        self.forward, self.cache, self.rows = forward, cache, size.rows
        self.graphs = Graphs(device)
        self.settings: Settings | None = None
        self.processors: Any = None

        def row_of(width: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size.rows, width, dtype=dtype, device=device)

        self.tokens, self.positions = row_of(1), row_of(1)
        self.uniforms, self.logprobs = row_of(size.tokens, torch.float64), row_of(size.tokens, torch.float32)
        self.ids, self.done = row_of(size.tokens), row_of(1, torch.bool)
        self.history = row_of(size.prompt + size.tokens)
        """Ids of the prompt and the completion; elsewhere a token of the row, so that penalties see nothing else."""
        self.temperature = torch.ones(1, device=device)
        self.stops = torch.zeros(0, dtype=torch.long, device=device)

    def set(self, settings: Settings, stops: Sequence[int]) -> None:
        """Sample with these settings from now on; graphs of other settings are dropped."""
        ids = torch.tensor(sorted(stops), device=self.stops.device)
        if settings == self.settings and torch.equal(ids, self.stops):
            return
        self.settings, self.stops = settings, ids
        self.graphs.clear()
        chosen = settings.sampling or SamplingConfig()
        self.processors = None if settings.plain else processors_of(chosen, settings.temperature)

    def begin(self, chunk: Chunk, group: Sequence[int], numbers: Sequence[int], req: Request) -> None:
        """Take over prefilled prompts and sample the first token of rows `numbers`, which answer prompts `group`."""
        self.rows, cap = len(group), req.sampling.max_completion_length
        prompts = req.prompt_ids[chunk.first : chunk.first + chunk.count]
        self.cache.load(chunk.cache, [len(ids) for ids in prompts], group)
        lengths = [len(prompts[p]) for p in group]
        self.positions[: self.rows, 0] = torch.tensor(lengths, device=self.positions.device)
        self.done.zero_()
        plain = self.settings is not None and self.settings.plain
        self.temperature.fill_(1.0 if req.temperature is None or not plain else req.temperature)
        if req.uniforms is not None:
            self.uniforms[: self.rows, :cap] = req.uniforms[list(numbers), :cap].to(self.uniforms.device)
        if not plain:
            width = self.history.shape[1]
            filled = [[*ids, *[ids[-1]] * (width - len(ids))] for ids in prompts]
            self.history[: self.rows] = torch.tensor(filled)[list(group)].to(self.history.device)
        self._draw(chunk.logits[torch.tensor(group, device=chunk.logits.device)])

    def advance(self) -> None:
        """Sample one more token of every row."""
        self.graphs.run(self.rows, self._step)

    def finished(self) -> list[bool]:
        """Flag of each row that has sampled a stop token; waits for the device."""
        return cast("list[bool]", self.done[: self.rows, 0].tolist())

    def not_finite(self, taken: int, places: Sequence[int]) -> int | None:
        """The first token of any of the rows whose scores were nan or infinite."""
        logprobs = self.logprobs[: self.rows, :taken]
        bad = ~logprobs.isfinite()
        if not bool(bad.any()):
            return None
        columns = bad[list(places)].any(0).nonzero()
        return int(columns[0, 0]) if len(columns) else None

    def read(self, places: Sequence[int], taken: int) -> Iterator[tuple[int, list[int], list[float]]]:
        """Place, ids and log-probs of these rows."""
        if places:
            index = torch.tensor(places, device=self.ids.device)
            ids, logprobs = self.ids[index, :taken].tolist(), self.logprobs[index, :taken].tolist()
            yield from zip(places, ids, logprobs, strict=True)

    def keep(self, places: Sequence[int], group: Sequence[int], taken: int) -> None:
        """Continue with these rows only, in this order."""
        index = torch.tensor(places, device=self.ids.device)
        self.rows = len(places)
        for rows in (self.tokens, self.positions, self.uniforms, self.logprobs, self.ids, self.done, self.history):
            rows[: self.rows] = rows[index]
        self.cache.keep(places, group, taken - 1)

    def _step(self) -> None:
        rows = self.rows
        scores = self.forward(self.tokens[:rows], self.positions[:rows], self.cache)
        self.cache.step.add_(1)
        self.positions[:rows].add_(1)
        self._draw(scores)

    def _draw(self, scores: Tensor) -> None:
        """Sample token number `cache.step` of each row, from the scores of the token before it."""
        rows, step, settings = self.rows, self.cache.step, self.settings
        assert settings is not None
        if not settings.plain:
            scores = self.processors(self.history[:rows], scores.float())
        uniforms = None if settings.greedy else self.uniforms[:rows]
        tokens, logprobs = sampling.draw(scores, self.temperature, uniforms, step)
        tokens = tokens[:, None]
        self.tokens[:rows] = tokens
        self.ids[:rows].index_copy_(1, step, tokens)
        self.logprobs[:rows].index_copy_(1, step, logprobs[:, None])
        self.done[:rows] |= (tokens == self.stops).any(1, keepdim=True)
        if not settings.plain:
            self.history[:rows].scatter_(1, self.positions[:rows], tokens)


class Graphs:
    """A captured graph per number of rows; elsewhere than on CUDA the plain function."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clear()

    def clear(self) -> None:
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._seen: set[int] = set()
        self._pool: Any = None

    def run(self, rows: int, step: Any) -> None:
        """Run one step: the first of a number of rows without a graph, which loads modules; then by a graph."""
        if self.device.type != "cuda":
            step()
        elif rows in self._graphs:
            self._graphs[rows].replay()
        elif rows not in self._seen:
            self._seen.add(rows)
            self._aside(step)
        else:
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
            self._graphs[rows] = graph
            graph.replay()

    def _aside(self, step: Any) -> None:
        """Run a step on a separate stream, as required before a capture."""
        current, stream = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            step()
        current.wait_stream(stream)
