"""A policy in memory that answers as any stage of its run; only the trained weights are exchanged."""

from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from grpo_nb import seeding
from grpo_nb.evaluation.compare import Stage
from grpo_nb.evaluation.evaluate import restore_policy, stage_checkpoint
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.rollout.eager import stream
from grpo_nb.rollout.request import Request
from grpo_nb.rollout.selfcheck import check_model
from grpo_nb.run.checkpoints import Checkpoint
from grpo_nb.run.run import Run
from grpo_nb.types import Prompt


class StagedPolicy:
    """The policy of a run; `answer` loads a stage's weights first. Loaded at the first answer.

    With LoRA the base model's adapter is kept, a few MiB. Where all weights train, those of the base model are read
    again from their source each time, so that no second copy stays.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._policy: Policy | None = None
        self._base: dict[str, Tensor] | None = None
        self._now: Checkpoint | None = None
        """Checkpoint of the policy's present weights; None: of the base model."""

    @property
    def loaded(self) -> bool:
        return self._policy is not None

    @property
    def step(self) -> int | None:
        """The step of the checkpoint that the weights are of; None: of no checkpoint."""
        return None if self._now is None else self._now.step

    def release(self) -> None:
        """Give the memory back; the next answer loads it again."""
        self._policy = self._base = self._now = None

    def at(self, stage: Stage) -> Policy:
        """The policy with the weights of a stage.

        Raises:
            RunError: the stage has no checkpoint.
            DependencyChanged, ModelError: as `restore_policy`.
        """
        wanted = stage_checkpoint(self.run, stage)
        if self._policy is None:
            self._policy = restore_policy(self.run, "base")
            self._base = self._policy.state() if isinstance(self._policy.model, PeftModel) else None
            check_model(self._policy)
        if wanted != self._now:
            self._policy.load_state(self._base_state() if wanted is None else wanted.tensors("policy"))
            self._now = wanted
        return self._policy

    def answer(self, stage: Stage, prompt: Prompt, temperature: float, most: int, luck: int = 0) -> Iterator[str]:
        """Answer of a stage to a prompt: yields all of its text so far, after each token.

        Args:
            temperature: 0 takes the likeliest token.
            most: tokens.
            luck: number of the random draws; the same for all stages, so that they differ by their weights alone.
        """
        policy = self.at(stage)
        greedy = temperature <= 0
        sampling = self.run.config.sampling.model_copy(
            update={"max_completion_length": most, "temperature": 1.0 if greedy else temperature}
        )
        generator = seeding.generator(self.run.config.run.seed, luck, "talk")
        uniforms = torch.rand(1, most, dtype=torch.float64, generator=generator)
        request = Request([policy.encode(prompt)], 1, sampling, None if greedy else uniforms, greedy)
        opened = policy.left_open(request.prompt_ids[0])
        for ids in stream(policy, request):
            yield opened + policy.decode_marked(ids)

    def takes_messages(self, stage: Stage) -> bool:
        """Whether its tokenizer has a chat template."""
        template: Any = self.at(stage).tokenizer.chat_template
        return bool(template)

    def _base_state(self) -> dict[str, Tensor]:
        return self._base or load_policy(self.run.config.model, self.run.config.run.seed).state()
