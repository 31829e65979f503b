"""The policy of a stage on one rank or several: loaded or given, in full or with its base spread over the ranks."""

import gc
import os

import torch

from grpo_nb.config import Config, ConfigError
from grpo_nb.policy.loading import pick_device
from grpo_nb.policy.model import Policy
from grpo_nb.policy.shards import Sharding
from grpo_nb.ranks.leader import Leader, Ranks
from grpo_nb.ranks.lockstep import Lockstep
from grpo_nb.rollout.selfcheck import load_alike
from grpo_nb.run.run import Run

SHARD = "GRPO_NB_SHARD"
"""Environment variable: replaces `model.shard` for this start of a run."""
WAYS = ("none", "fsdp2")


def wanted(config: Config) -> bool:
    """Whether the settings spread the base over the ranks.

    Raises:
        ConfigError: the variable has another value.
    """
    way = os.environ.get(SHARD) or config.model.shard
    if way not in WAYS:
        raise ConfigError(f"{SHARD}='{way}' is no way to spread a model; set it to one of: {', '.join(WAYS)}")
    return way == "fsdp2"


def refuse_alone(config: Config) -> None:
    """Refuse to spread a base over one rank.

    Raises:
        ConfigError: that is wanted.
    """
    if wanted(config):
        raise ConfigError(
            "model.shard='fsdp2' spreads the base over several GPUs, and one process trains. Start with --gpus 2 or "
            f"more (start(run, gpus=2)); where the base fits this device, set {SHARD}=none"
        )


def policy_for(run: Run, given: Policy | None, ranks: Ranks) -> Policy:
    """Rank 0's policy, loaded by all ranks at once where they hold the base together.

    Raises:
        ModelError: it cannot be loaded, or was spread over ranks that no longer train together.
    """
    if isinstance(ranks, Leader) and ranks.lockstep is not None:
        ranks.load()
        return own_part(run, given, ranks.lockstep)
    return given or loaded(run)


def own_part(run: Run, given: Policy | None, passes: Lockstep) -> Policy:
    """This rank's part of the policy; every rank calls it at once.

    Raises:
        ModelError: this rank cannot load it.
        LockstepError: another rank cannot load it.
    """
    gc.collect()  # the policy of an earlier stage is in cycles, and holds its part of the weights
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        sharding = Sharding(passes.weights, pick_device(run.config.model.device), passes)
        policy = given or loaded(run, sharding)
        if policy.full:
            refuse_reports(run.config)
        if policy.sharding is None:
            policy.shard(sharding)
    except Exception:
        passes.present(False)
        raise
    passes.serve(policy.fill, lambda: policy.refers)
    return policy


def refuse_reports(config: Config) -> None:
    """Refuse settings that need the complete gradient of each objective.

    Raises:
        ConfigError: names the setting.
    """
    algorithm, several = config.algorithm, len(config.objectives) > 1
    if several and algorithm.combine != "sum":
        raise ConfigError(
            f"model.shard='fsdp2' with all weights learning shards gradients, and algorithm.combine="
            f"'{algorithm.combine}' needs complete ones. Set algorithm.combine='sum', or model.train='lora'"
        )
    if algorithm.gradient_report_every:
        raise ConfigError(
            f"model.shard='fsdp2' with all weights learning spreads gradients, and algorithm.gradient_report_every="
            f"{algorithm.gradient_report_every} needs complete ones. Set it to 0, or model.train='lora'"
        )


def loaded(run: Run, sharding: Sharding | None = None) -> Policy:
    """The policy that the run's settings describe."""
    run.doing(f"loading the model {run.config.model.name}")
    return load_alike(run.config.model, run.config.run.seed, sharding)
