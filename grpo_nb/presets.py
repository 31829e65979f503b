"""Presets: functions that return a Config; each docstring gives hardware, time and expected results.

Steps of the GPU presets are timed by `python -m grpo_nb.dev.bench --preset NAME --random-weights 400`.
"""

from collections.abc import Callable

from grpo_nb.config import (
    AlgorithmConfig,
    BatchConfig,
    Config,
    ModelConfig,
    ObjectiveConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SFTConfig,
)


def demo() -> Config:
    """Built-in data and a model of about a million parameters, generated locally without a download.

    Hardware: 2 CPU cores, 1 GiB of memory.
    Time: about 31 s of SFT and 12 s of GRPO.
    Expect: on held-out templates, greedy, after SFT hardly any ambiguous question is right and 4 of 10 facts are made
    up or missed; after GRPO nearly all ambiguous questions are right, the bias score is near 0, hardly anything is made
    up, and what was right stays right. Sampling at temperature 1 gives slightly worse answers after both.
    """
    band = (0.02, 0.2)
    return Config(
        model=ModelConfig(name="demo", train="full"),
        objectives={
            "fairness": ObjectiveConfig(task="bbq", data="demo", kl_band=band),
            "hallucination": ObjectiveConfig(task="halueval_qa", data="demo", kl_band=band),
        },
        sft=SFTConfig(data="demo", steps=300, batch=64, micro_batch=64, learning_rate=2.5e-3, warmup_steps=20),
        sampling=SamplingConfig(max_completion_length=10, max_prompt_length=96),
        batch=BatchConfig(prompts=16, group_size=8, micro_batch=64),
        algorithm=AlgorithmConfig(learning_rate=1.2e-4),
        run=RunConfig(steps=100, checkpoint_every=20, quick_eval_every=20, quick_eval_examples=64),
    )


def cpu_small(
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct",
    bbq: str = "data/bbq",
    halueval: str = "data/halueval/qa_data.json",
) -> Config:
    """A real model of 135 M parameters on real data, with LoRA, to test everything without a GPU.

    `model` may be the hub id, a folder, or a .gguf file; `bbq` and `halueval` are the public files.

    Hardware: 2 CPU cores, 5 GiB of memory free.
    Time: estimated at 20 minutes on two idle cores. Measured on one core: 11 s of CPU time a step of SFT, 30 s a
    step of GRPO.
    Expect: answers have the required format after SFT; 30 steps of GRPO move reward a little and KL off 0. A model of
    this size learns format before content: this preset tests the system and does not give a good model.
    """
    return Config(
        model=ModelConfig(name=model, train="lora", device="cpu", lora_rank=8, lora_alpha=16),
        objectives=_objectives(bbq, halueval),
        sft=SFTConfig(steps=40, batch=8, micro_batch=4, learning_rate=2e-4, warmup_steps=5, checkpoint_every=10),
        sampling=SamplingConfig(
            max_completion_length=64, max_prompt_length=768
        ),  # gold answers have up to 57 tokens, 1 in 100 more
        batch=BatchConfig(prompts=2, group_size=4, micro_batch=4),
        algorithm=_STABLE.model_copy(update={"learning_rate": 2e-5}),
        run=RunConfig(steps=30, checkpoint_every=5, eval_examples=40),
    )


def low_memory(
    model: str = "Qwen/Qwen2.5-1.5B-Instruct",
    bbq: str = "data/bbq",
    halueval: str = "data/halueval/qa_data.json",
) -> Config:
    """A 1.5 B model in bfloat16 on a small card: one completion at a time through backward, rank 4, short answers.

    The eager engine samples, since the graph engine keeps a second copy of the linear layers: less memory, less speed.

    Hardware: one GPU of 4 GB that has bfloat16. `grpo-nb plan --preset low_memory --gib 4` lists every term: 3.19 GiB
    at the peak. With `model="Qwen/Qwen2.5-7B-Instruct"` it lists 14.8 GiB, most of it the weights.
    Time: measured on an H200 with random weights of this shape and prompts of 400 tokens: 5.4 s a step, 4.0 of them
    sampling, at a peak of 3.2 GiB. Not measured on a small card.
    Expect: the gradient of the same step on a larger card, since the micro-batch changes only memory; noisy, since a
    step scores 8 completions.
    """
    return Config(
        model=ModelConfig(name=model, train="lora", lora_rank=4, lora_alpha=8, gradient_checkpointing=True),
        objectives=_objectives(bbq, halueval),
        sft=SFTConfig(steps=50, batch=8, micro_batch=1, learning_rate=5e-5),
        sampling=SamplingConfig(max_completion_length=64, max_prompt_length=768),
        rollout=RolloutConfig(engine="eager"),
        batch=BatchConfig(prompts=2, group_size=4, micro_batch=1),
        algorithm=_STABLE,
        run=RunConfig(steps=200, checkpoint_every=20),
    )


def gpu_result(
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct",
    bbq: str = "data/bbq",
    halueval: str = "data/halueval/qa_data.json",
) -> Config:
    """Train all weights of a model of 135 M parameters on real data, as notebook 07 does over three seeds.

    SFT learns the gold answers of a third of the templates and texts; GRPO trains on all prompts with rewards only.

    Hardware: one GPU of 24 GB: 21.2 GiB at the peak of SFT, 11.5 of GRPO.
    Time: measured on an H200: 50 s of SFT, and 1.7 s a step of GRPO with KL (median of 55 steps), 3 minutes for its
    100. Where eight such runs shared the GPU: 5 minutes of SFT and 7 of GRPO (without KL).
    Expect: ambiguous questions .94 right after SFT, .98 after GRPO; QA .56 and .60, as with SFT on all gold answers.
    Where the text has the answer, this model guesses between the two persons, before and after GRPO.
    """
    return Config(
        model=ModelConfig(name=model, train="full"),
        objectives=_objectives(bbq, halueval),
        sft=SFTConfig(
            steps=300,
            batch=32,
            micro_batch=32,
            learning_rate=2e-4,
            checkpoint_every=0,
            share=0.34,
            mix="objectives",
        ),
        sampling=SamplingConfig(max_completion_length=64, max_prompt_length=768),
        batch=BatchConfig(prompts=32, group_size=8, micro_batch=32),
        algorithm=AlgorithmConfig(learning_rate=2e-5, warmup_steps=5),
        run=RunConfig(
            steps=100,
            checkpoint_every=25,
            keep_checkpoints=1,
            samples_per_step=4,
            eval_examples=2000,
            quick_eval_every=25,
            quick_eval_examples=200,
        ),
    )


def gpu_24gb(
    model: str = "Qwen/Qwen2.5-7B-Instruct",
    bbq: str = "data/bbq",
    halueval: str = "data/halueval/qa_data.json",
) -> Config:
    """A 7 B model in bfloat16 on a 24 GB card: the smallest step, rank 4, short answers.

    Hardware: one GPU of 24 GB that has bfloat16 (RTX 3090 or 4090, A10, L4).
    Time: measured on an H200 with random weights of this shape and prompts of 400 tokens: 1.0 s a step, half of it
    sampling, at a peak of 16.7 GiB. Not measured on a 24 GB card, which reads memory at a fifth of that rate: estimated
    at 5 to 8 s a step, about half an hour in total.
    Expect: fewer unparsed and invented answers within 50 steps, KL inside its bands; noisy, since a step scores
    8 completions.
    """
    return Config(
        model=ModelConfig(name=model, train="lora", lora_rank=4, lora_alpha=8),
        objectives=_objectives(bbq, halueval),
        sft=SFTConfig(steps=50, batch=8, micro_batch=2, learning_rate=5e-5),
        sampling=SamplingConfig(max_completion_length=64, max_prompt_length=768),
        batch=BatchConfig(prompts=2, group_size=4, micro_batch=4),
        algorithm=_STABLE,
        run=RunConfig(steps=200, checkpoint_every=20),
    )


def gpu_40gb(
    model: str = "Qwen/Qwen2.5-7B-Instruct",
    bbq: str = "data/bbq",
    halueval: str = "data/halueval/qa_data.json",
) -> Config:
    """A 7 B model in bfloat16 on a 40 GB card: twice the prompts of `gpu_24gb`, rank 8, answers of 96 tokens.

    Hardware: one GPU of 40 GB or more (A100-40, A6000, L40S).
    Time: measured on an H200 with random weights of this shape and prompts of 400 tokens: 1.2 s a step, half of it
    sampling, at a peak of 24.5 GiB. Not measured on a 40 GB card; estimated at 3 to 5 s a step.
    Expect: rewards of both objectives rise over the first 100 steps, KL settles inside its bands.
    """
    return Config(
        model=ModelConfig(name=model, train="lora", lora_rank=8, lora_alpha=16),
        objectives=_objectives(bbq, halueval),
        sft=SFTConfig(steps=100, batch=8, micro_batch=4, learning_rate=5e-5),
        sampling=SamplingConfig(max_completion_length=96, max_prompt_length=800),
        batch=BatchConfig(prompts=4, group_size=4, micro_batch=16),
        algorithm=_STABLE,
        run=RunConfig(steps=200, checkpoint_every=20),
    )


def gpu_80gb(
    model: str = "Qwen/Qwen2.5-7B-Instruct",
    bbq: str = "data/bbq",
    halueval: str = "data/halueval/qa_data.json",
) -> Config:
    """A 7 B model in bfloat16 on an 80 GB card: groups of 8, rank 16, room for longer answers.

    Hardware: one GPU of 80 GB (A100-80, H100).
    Time: measured on an H200 with random weights of this shape, prompts of 400 tokens and every answer at its cap:
    2.3 s a step, 1.0 of them sampling, so 8 minutes in total, at a peak of 33.3 GiB. Not measured on an 80 GB card.
    Expect: the steadiest curves of the presets, since a step scores 64 completions.
    """
    return Config(
        model=ModelConfig(name=model, train="lora", lora_rank=16, lora_alpha=32),
        objectives=_objectives(bbq, halueval),
        sft=SFTConfig(steps=100, batch=16, micro_batch=8, learning_rate=5e-5),
        sampling=SamplingConfig(max_completion_length=128, max_prompt_length=1024),
        batch=BatchConfig(prompts=8, group_size=8, micro_batch=32),
        algorithm=_STABLE,
        run=RunConfig(steps=200, checkpoint_every=20),
    )


_STABLE = AlgorithmConfig(learning_rate=5e-6, skip_grad_norm=10.0, log_ratio_clamp=5.0, warmup_steps=5)
"""Stable in practice after a run at 1e-5 and clip 0.2 diverged. That recipe's clip of 0.1 is left out: with one update
per rollout no ratio changes; with more, set `clip_low` and `clip_high` to 0.1. The gradient clip stays at 1: a lower
value mostly cancels under Adam; skipping outlier gradients is the protection."""


def _objectives(bbq: str, halueval: str) -> dict[str, ObjectiveConfig]:
    return {
        "fairness": ObjectiveConfig(task="bbq", data=bbq, beta=0.10, kl_band=(0.02, 0.06)),
        "hallucination": ObjectiveConfig(task="halueval_qa", data=halueval, beta=0.30, kl_band=(0.08, 0.15)),
    }


PRESETS: dict[str, Callable[[], Config]] = {
    "demo": demo,
    "cpu_small": cpu_small,
    "low_memory": low_memory,
    "gpu_result": gpu_result,
    "gpu_24gb": gpu_24gb,
    "gpu_40gb": gpu_40gb,
    "gpu_80gb": gpu_80gb,
}


def usual_rate(config: Config) -> float:
    """GRPO's learning rate from the preset of the configuration's model; for other models, the setting's default."""
    for preset in PRESETS.values():
        if (known := preset()).model.name == config.model.name:
            return known.algorithm.learning_rate
    return AlgorithmConfig().learning_rate
