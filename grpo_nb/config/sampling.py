"""Settings of the sampler and of the engine that runs it."""

from typing import Annotated, Literal

from pydantic import Field

from grpo_nb.config.base import Count, Positive, Settings
from grpo_nb.config.judge import Address, JudgeProvider, Variable
from grpo_nb.storage import former_names


class SamplingConfig(Settings):
    """Settings of the sampler. With temperature 1 and the other defaults, sampler and policy are equal."""

    former = former_names.SETTINGS["sampling"]

    temperature: Positive = 1.0
    """Divisor of the logits when sampling and in every log-prob; a knob while training."""
    max_completion_length: Count = 256
    """Cap on completion length in tokens, stop token included."""
    max_prompt_length: Count = 1024
    """Cap on prompt length in tokens. A longer prompt is an error before any work; prompts are never cut."""

    # advanced
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the sampler differs from the scored policy: measured and warned about."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k likeliest tokens; 0 keeps all. Same warning."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens below this share of the likeliest; 0 drops none. Same warning."""
    repetition_penalty: Positive = 1.0
    """Above 1 penalises tokens already present, the prompt's too. Same warning."""

    @property
    def changes_policy(self) -> bool:
        """Whether settings other than temperature make the sampler's distribution differ from the scored policy's."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1


class RolloutConfig(Settings):
    """Engine that samples the completions."""

    # advanced
    engine: Literal["auto", "eager", "graph", "grouped", "vllm"] = "auto"
    """`eager` runs anywhere; `graph`, on CUDA, captures the decoding loop and is many times faster; `grouped`, on the
    CPU, is faster for models of a few million parameters; `auto`: one of these where it serves the model. They sample
    the same distribution with different bits. `vllm`: a server samples for LoRA; a resumed run then repeats its
    numbers only up to rounding."""
    steps_off_policy: Literal[0, 1] = 0
    """1: the next step's completions are sampled before this step's update, so that judges answer while it trains. They
    are one update older than the policy that learns from them; `algorithm.importance_correction` weighs for that. A
    change of the temperature acts at once: completions sampled ahead are discarded."""
    url: Address | None = None
    """Address of the running vLLM server, e.g. http://127.0.0.1:8000; the variable GRPO_NB_VLLM_URL replaces it. Null:
    the trainer starts a server with the `vllm` command that the variable GRPO_NB_VLLM names."""
    api_key_env: Variable | None = None
    """NAME of the environment variable that holds the server's key, never the key; null for a server without one."""
    timeout_s: Positive = 600
    """Time limit in seconds of one request (the K completions of a prompt), waiting included."""
    patience_s: Positive = 300
    """Seconds that a step waits for a server that is unreachable, restarts or fails; then the run ends, saved. A server
    that the trainer starts itself has 900 s for each start."""

    @property
    def server(self) -> JudgeProvider | None:
        """Server of the settings as a `JudgeProvider`, the form that requests are sent to; None without a `url`."""
        if self.url is None:
            return None
        return JudgeProvider(model="vllm", base_url=self.url, api_key_env=self.api_key_env)

    def unused_settings(self) -> list[str]:
        """One sentence for each changed server setting while no server samples."""
        need = [("rollout.engine='vllm'", self.engine == "vllm")]
        return self._unused("rollout", dict.fromkeys(("url", "api_key_env", "timeout_s", "patience_s"), need))
