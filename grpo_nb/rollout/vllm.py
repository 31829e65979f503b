"""The engine that samples on a vLLM server: token ids in and out, the policy's adapter loaded anew when it has changed.

Which of its results are exact:

- The adapter's name is a hash of its weights, so that a name never stands for two sets of weights: neither the server's
  prefix cache nor a restart can mix them up. A step whose update was skipped loads nothing.
- The seed of each request is a function of (seed, step, row). Two runs that send the same server the same requests get
  the same tokens only if the
  server's log-probs do not depend on its other requests, which vLLM does not promise: a resumed run has the same
  prompts, seeds and weights as one that never stopped, and the same completions up to rounding, not bit for bit. The
  events `start` and `resume` log this (`server`: `exact` is false).
- The server computes with kernels and a precision of its own. How far its log-probs are from the trainer's is measured
  every step (`sampler_logp_difference/mean`); where that is more than rounding, the rules `sampler_*` report it, and
  `algorithm.importance_correction` weighs for it.
"""

import asyncio
import hashlib
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

import torch
from peft import PeftModel

from grpo_nb.config import RolloutConfig
from grpo_nb.policy import anatomy
from grpo_nb.policy.model import ModelError, Policy
from grpo_nb.printable import clean_logger
from grpo_nb.rewards.background import Background
from grpo_nb.rewards.waiting import wait_for
from grpo_nb.rollout import eager
from grpo_nb.rollout.request import Request
from grpo_nb.rollout.selfcheck import sampler_gaps
from grpo_nb.rollout.vllm_process import START_SECONDS, OwnServer, own_server
from grpo_nb.rollout.vllm_server import RELOADS, Choice, Server, ServerError, Session, arguments, command
from grpo_nb.types import Rollouts

logger = clean_logger(__name__)

AT_ONCE = 256
"""Concurrent requests; the server batches and queues them."""
POLL_SECONDS = 0.5
"""Seconds between two looks at the requests, so that a stop is noticed while the server is slow."""
ANSWER_SECONDS = 10.0
"""Time limit of a request while the server starts."""
OTHER_MODEL = 0.25
"""Mean |Δ log p| in nats, at CHECKED_AT, above which the server's model is another one."""
CHECKED_AT = 0.5
"""Temperature of the check: log-probs from before it differ by much."""


class VLLMEngine:
    """Samples from a LoRA policy through a vLLM server: a running one, or one that the engine starts and ends.

    Raises:
        ConfigError: no address is set, nor a program that starts a server.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        self._own = own_server(rollout)
        self._server = Server(rollout, self._own.url if self._own else "")
        if self._own:
            self._server.revive, self._server.advice = self._own.revive, self._own.end_of_log
        self._background = Background()
        """Event loop in which begun requests run."""
        self._home: finalize[..., VLLMEngine] | None = None
        """Removes the folder of the adapters, at the latest with the engine."""
        self._loaded = ""
        """Name of the adapter that the server got last."""
        self._checked: WeakSet[Policy] = WeakSet()
        self.about: dict[str, Any] = {}
        """What the server reported about itself when it was checked, for the log."""

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        """K completions per prompt in one request each, with log-probs after all of `sampling`.

        Raises:
            ModelError: as `EagerEngine.generate`, or as `check`.
            ValueError: as there.
            ConfigError: as `check`.
            ServerError: the server was gone for longer than `rollout.patience_s`, or lacks what is needed.
        """
        self._check_asked(policy, request)
        return self._generate(policy, request)

    def begin(self, policy: Policy, request: Request) -> "Future[Rollouts]":
        """Start a `generate` that runs while this thread trains; the adapter's files are written before this returns.

        Raises:
            ModelError, ValueError, ConfigError, ServerError: as `generate` before it samples; later errors are raised
            by the future.
        """
        self._check_asked(policy, request)
        return self._background.start(self._drawn(policy, request, self._names(policy)))

    def _check_asked(self, policy: Policy, request: Request) -> None:
        eager.check(policy, request)
        if policy not in self._checked:
            self.check(policy, max(map(len, request.prompt_ids), default=0) + request.sampling.max_completion_length)

    def check(self, policy: Policy, longest: int) -> None:
        """Check before any work that requests to the server are allowed, and that it serves this policy's model.

        Args:
            longest: tokens of a prompt with its completion, at most.

        Raises:
            ConfigError: the host, or a key for it, was never confirmed on this machine.
            ModelError: the policy is no LoRA policy, or the server to start cannot read its model.
            ServerError: no runtime LoRA, another model or vocabulary, no token ids, too short a context, log-probs from
                before the temperature, or no answer; says how to start a server that has it. Or the server that was
                to be started ended at once; with the end of its log.
        """
        if not isinstance(policy.model, PeftModel):
            raise ModelError(
                "rollout.engine='vllm' serves LoRA adapters, and this policy trains all its weights. Set "
                "model.train='lora', or another rollout.engine"
            )
        self._server.check_ready()
        try:
            if self._own:
                self._own.start(arguments(_servable(policy), anatomy.rank(policy.model), longest))
                self._server.move(self._own.url, self._own.key)
                wait_for(self._started(self._own))
            self.about = wait_for(self._ask_about(longest))
            self._check_model(policy)
            self._checked.add(policy)
        except BaseException as error:  # an interrupt, too: a server that was started does not stay
            self.close()
            if self._own or not isinstance(error, ServerError):
                raise
            advice = command(policy.name, anatomy.rank(policy.model), longest)
            raise ServerError(f"{error}. This command starts a suitable server: {advice}") from None

    def close(self) -> None:
        """Unload the adapter, remove its files and cancel unfinished requests; the next rollout loads it again.

        A server that the engine started ends.
        """
        self._background.close()
        name, self._loaded = self._loaded, ""
        if self._home is not None:
            self._home()
            self._home = None
        if self._own:
            self._own.stop()
            self._checked.clear()
        elif name:
            try:
                wait_for(self._unload(name))
            except ServerError as error:
                logger.warning("%s", error)

    async def _started(self, own: OwnServer) -> None:
        """Wait until the server that was started answers.

        Raises:
            ServerError: it ended, or did not answer in START_SECONDS.
        """
        end = time.monotonic() + START_SECONDS
        while not own.ready:
            own.check_alive()
            try:
                await asyncio.wait_for(self._ask_about(0), ANSWER_SECONDS)
                own.check_alive()  # where it has ended, another program answered
                own.ready = True
            except (ServerError, TimeoutError):
                own.check_alive()
                if time.monotonic() > end:
                    raise ServerError(f"vLLM did not answer within {START_SECONDS:g} s. {own.end_of_log()}") from None
                await asyncio.sleep(POLL_SECONDS)

    async def _ask_about(self, needed: int) -> dict[str, Any]:
        async with self._server.open(patience_s=0) as session:
            version, card = await session.about()
        if card.max_model_len is not None and card.max_model_len < needed:
            raise ServerError(
                f"the server takes {card.max_model_len} tokens, and a prompt with its completion may have {needed}"
            )
        about = {"vllm": version, "model": card.id[:200], "max_model_len": card.max_model_len, "exact": False}
        return {"url": self._server.label, **about}

    def _check_model(self, policy: Policy) -> None:
        """Compare log-probs of tokens that the server samples with the policy's own."""

        def draw(policy: Policy, request: Request) -> Rollouts:
            return self._generate(policy, request, patience_s=0)

        gap, before = (float(d.abs().mean()) for d in sampler_gaps(policy, draw, CHECKED_AT, (CHECKED_AT, 1.0)))
        if gap <= OTHER_MODEL:
            self.about["check_gap"] = gap
            return
        if before < gap / 4:
            raise ServerError(
                f"the server's log-probs are those before the temperature (they differ by {gap:.2g} nats from those of "
                "the distribution that is drawn from). It needs --logprobs-mode processed_logprobs"
            )
        raise ServerError(
            f"the server's log-probs differ by {gap:.2g} nats from the policy's on average: it serves another model "
            f"({self.about['model']}), or another version of it"
        )

    def _generate(self, policy: Policy, request: Request, patience_s: float | None = None) -> Rollouts:
        return wait_for(self._drawn(policy, request, self._names(policy), patience_s))

    async def _drawn(
        self, policy: Policy, request: Request, names: tuple[str, str], patience_s: float | None = None
    ) -> Rollouts:
        drawn = eager.Drawn(policy, request)
        await self._draw(policy, request, drawn, names, patience_s)
        return drawn.rollouts()

    def _names(self, policy: Policy) -> tuple[str, str]:
        """Name of the adapter that the server has, and of the one it needs, whose files are written."""
        return self._loaded, self._written(policy)

    def _written(self, policy: Policy) -> str:
        """The name of the policy's adapter, whose files lie under it."""
        digest = hashlib.blake2b(digest_size=16)
        for key, tensor in sorted(policy.state().items()):
            digest.update(key.encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        name = f"grpo-nb-{digest.hexdigest()}"
        if not (folder := self._folder(name)).is_dir():
            unfinished = folder.with_suffix(".tmp")
            policy.save(unfinished)
            unfinished.rename(folder)
        return name

    def _folder(self, name: str) -> Path:
        if self._home is None:
            self._root = Path(tempfile.mkdtemp(prefix="grpo_nb-"))
            self._home = finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        return self._root / name

    async def _draw(
        self, policy: Policy, request: Request, drawn: eager.Drawn, names: tuple[str, str], patience_s: float | None
    ) -> None:
        """Sample with the second adapter, once the first, if it is another one, is unloaded."""
        before, name = names
        async with self._server.open(patience_s) as session:
            if before != name:
                if before:
                    await session.unload(before)
                    shutil.rmtree(self._folder(before), ignore_errors=True)
                await session.load(name, self._folder(name))
                self._loaded = name
            gate = asyncio.Semaphore(AT_ONCE)
            tasks = {
                asyncio.create_task(self._completions(session, body, gate)): place
                for place, body in enumerate(bodies(policy, request, name))
            }
            waiting = set(tasks)
            try:
                while waiting:
                    done, waiting = await asyncio.wait(
                        waiting, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        _take(policy, request, drawn, tasks[task], task.result())
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _completions(
        self, session: Session, body: Mapping[str, Any], gate: asyncio.Semaphore
    ) -> Sequence[Choice]:
        """The completions of one prompt; a restarted server gets the adapter again."""
        async with gate:
            for _ in range(RELOADS + 1):
                if (choices := await session.complete(body)) is not None:
                    return choices
                logger.warning("%s has no adapter %s: it is loaded again", self._server.label, body["model"])
                await session.load(body["model"], self._folder(body["model"]))
        raise ServerError(f"{self._server.label} lost the adapter {RELOADS + 1} times in a row, within one request")

    async def _unload(self, name: str) -> None:
        async with self._server.open(patience_s=0) as session:
            await session.unload(name)


def _servable(policy: Policy) -> str:
    """The folder or hub id of the policy's base model, which vLLM reads.

    Raises:
        ModelError: it has neither.
    """
    source = policy.origin.source
    source = source.base if source is not None and source.base is not None else source
    if source is None or source.kind not in ("folder", "hub"):
        raise ModelError(
            f"vLLM reads a folder or a hub id, and the base of '{policy.name}' is {source.kind if source else 'none'}. "
            "Write it as a folder first (transformers' save_pretrained, with the tokenizer) and set model.name to that"
        )
    return source.name


def bodies(policy: Policy, request: Request, model: str) -> list[dict[str, Any]]:
    """Request for each prompt, without defaults of the server or of its model's files."""
    sampling, group = request.sampling, request.group_size
    common = {
        "model": model,
        "n": group,
        "max_tokens": sampling.max_completion_length,
        "temperature": request.temperature or 0.0,
        "top_p": sampling.top_p if request.temperature else 1.0,
        "top_k": sampling.top_k if request.temperature else 0,
        "min_p": sampling.min_p if request.temperature else 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(policy.stop_token_ids),
        "ignore_eos": True,  # these stop tokens, and no others of the server
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
    }
    uniforms = request.uniforms
    # vLLM gives the K completions of a request consecutive seeds, from this one on
    seeds = [None] * len(request.prompt_ids) if uniforms is None else (uniforms[::group, 0] * 2**53).long().tolist()
    every = zip(request.prompt_ids, seeds, strict=True)
    return [common | {"prompt": list(ids), "seed": seed} for ids, seed in every]


def _take(policy: Policy, request: Request, drawn: eager.Drawn, place: int, choices: Sequence[Choice]) -> None:
    """Record the completions of one prompt.

    Raises:
        ServerError: they do not match the request.
    """
    group, cap = request.group_size, request.sampling.max_completion_length
    ends, rows = set(policy.stop_token_ids), range(place * group, (place + 1) * group)
    if [choice.index for choice in choices] != list(range(group)):
        raise ServerError(f"the server gave {len(choices)} completions of a prompt; {group} were requested")
    for row, choice in zip(rows, choices, strict=True):
        ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs
        if choice.prompt_token_ids != list(request.prompt_ids[place]):
            raise ServerError("the server completed other token ids than it was sent")
        if not all(0 <= token < policy.tokenization.rows for token in ids):
            raise ServerError(
                f"the server drew token {max(ids)}, and the policy's vocabulary has "
                f"{policy.tokenization.rows}: it serves another model"
            )
        complete = ids and (ids[-1] in ends if choice.finish_reason == "stop" else len(ids) == cap)
        if not complete or len(ids) > cap or len(logprobs) != len(ids):
            raise ServerError(
                f"the server ended a completion of {len(ids)} tokens by '{choice.finish_reason}', with {len(logprobs)} "
                f"log-probs; it must end at a stop token ({sorted(ends)}) or at {cap} tokens"
            )
        drawn.ids[row], drawn.logprobs[row] = list(ids), list(logprobs)
    drawn.end(rows)
