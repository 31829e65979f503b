"""Golden numbers from TRL itself: `python -m tests.golden.make_trl`, where trl==1.16.0 is installed.

Nothing of TRL is transcribed. A real GRPOTrainer is built from a real GRPOConfig for every case; only what costs a
model is replaced: the sampler hands out scripted completions, the forward pass looks its log-probs up in a table. Both
know a row by its prompt, whose one token is the row's number. What is recorded is then TRL's own:

- advantages: `_prepare_inputs` -> `_generate_and_score_completions`, with reward functions that return given numbers;
- losses: the same path, then `compute_loss`, once per micro-batch; the advantages are the case's.

Every case is computed in float32 and in float64. Float64 needs no change of TRL: torch's default type is set, and the
tables are float64. TRL rounds rewards and their weights to float32 in any case, so round them before comparing.

How the file reads: `inputs[name]` are tables [row, token] and lists [row]; a loss case names its inputs, every setting
that acts on it under TRL's own name, and its results; `gradient` is d loss / d logp and `norm` its L2 norm, summed over
the micro-batches in `slices`. `old` is "given" where TRL had recorded log-probs to compare with, "own" where it takes
the policy's present ones. `entropy` is a table of its own, hence `gradient_entropy`. `notes` say where TRL moved since
the numbers that the losses were first checked against, and what to know before agreeing with it.
"""

import contextlib
import json
import logging
import math
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from tests.golden.trl_cases import EOS, NOTES, PAD, WORD, Judged, Rows, Settings, blank, judged_cases, loss_cases

TARGET = Path(__file__).parent / f"trl-{version('trl')}.json"
POLICY = "the policy being trained"

# ---- TRL, with the model taken out


class ScriptedTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer over a script of rows; `own_advantages` keeps those that it computes from rewards."""

    rows: Rows
    own_advantages = False
    produced: dict[str, Any]

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        rows = self.rows
        completions = rows.completions()
        logps = [told(table[:n].tolist()) for table, n in zip(rows.sampler, rows.lengths, strict=True)]
        return [[i] for i in range(len(prompts))], completions, None, [""] * len(prompts), logps, {}, None, []

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, None]:
        rows, order = self.rows, input_ids[:, 0]
        table = rows.logp if model is POLICY else rows.old if model is self.model else rows.ref
        return table[order], rows.entropy[order], None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self.produced = dict(batch)
        return batch if self.own_advantages else batch | {"advantages": self.rows.advantages}


def told(logps: Sequence[float]) -> list[float | None]:
    """As the sampler says it: None where it has no log-prob."""
    return [None if math.isnan(logp) else logp for logp in logps]


def model_folder(path: Path) -> Path:
    """The smallest model that the trainer takes; nothing runs through it."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    special = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": EOS}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **shape, **special)).save_pretrained(path)
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(WORD, 16)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    return path


def trainer(folder: Path, rows: Rows, rewards: Sequence[Any], vllm: Settings | None, **settings: Any) -> Any:
    """A trainer with these settings; `vllm` switches its importance correction on without the server."""
    accumulated = settings.get("gradient_accumulation_steps", 1)
    splits = settings.get("steps_per_generation", accumulated)
    arguments = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=len(rows.lengths) // splits,
        num_generations=rows.group_size,
        max_completion_length=rows.max_completion,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        **settings,
        **{f"vllm_importance_sampling_{key}": value for key, value in (vllm or {}).items()},
    )
    data = Dataset.from_dict({"prompt": ["w2"] * len(rows.lengths)})
    made = ScriptedTrainer(model=str(folder), reward_funcs=list(rewards), args=arguments, train_dataset=data)
    made.rows, made.use_vllm, made.current_gradient_accumulation_steps = rows, vllm is not None, accumulated
    made.model.train()
    return made


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def prompts(rows: Rows) -> list[dict[str, str]]:
    return [{"prompt": "w2"} for _ in rows.lengths]


# ---- advantages


def judge_all(folder: Path) -> list[dict[str, Any]]:
    ways = [("group", "sum_then_normalize"), ("batch", "sum_then_normalize"), ("none", "sum_then_normalize")]
    ways += [("group", "normalize_then_sum")]
    return [judge(folder, case, scale, order) for case in judged_cases() for scale, order in ways]


def judge(folder: Path, case: Judged, scale: str, order: str) -> dict[str, Any]:
    """The advantages of these rewards, with the metrics that TRL reports of them."""
    record: dict[str, Any] = vars(case) | {"scale_rewards": scale, "multi_objective_aggregation": order}
    functions = [returning(f"f{k}", column) for k, column in enumerate(zip(*case.rewards, strict=True))]
    for dtype in (torch.float64, torch.float32):
        rows = blank(len(case.rewards), case.group_size)
        weights = list(case.weights) if case.weights else None
        options = {"scale_rewards": scale, "multi_objective_aggregation": order, "reward_weights": weights}
        made = trainer(folder, rows, functions, None, **options)
        made.own_advantages = True
        with default_dtype(dtype):
            made._prepare_inputs(prompts(rows))
        record[name_of(dtype)] = {
            "advantages": listed(made.produced["advantages"], dtype),
            "metrics": metrics(made, "reward", "reward_std", "frac_reward_zero_std"),
        }
    return record


def returning(name: str, values: Sequence[float | None]) -> Any:
    """A reward function that has made up its mind."""

    def function(**_: Any) -> list[float | None]:
        return list(values)

    function.__name__ = name
    return function


# ---- losses


def lose(folder: Path, name: str, rows: Rows, variant: Settings) -> dict[str, Any]:
    """One case: its settings, then what TRL's `compute_loss` makes of it in both types."""
    settings: dict[str, Any] = {"num_iterations": 2, "use_bias_correction_kl": False} | dict(variant)
    if settings["loss_type"] == "cispo":
        settings = {"epsilon_high": 5.0} | settings
    vllm = settings.pop("vllm", None)
    record: dict[str, Any] = {"inputs": name}
    for dtype in (torch.float64, torch.float32):
        made = trainer(folder, rows.to(dtype), [returning("f", [0.0] * len(rows.lengths))], vllm, **settings)
        with default_dtype(dtype):
            result = run_micro_batches(made)
        record |= {"settings": acting_settings(made), name_of(dtype): result}
    return record


def run_micro_batches(made: Any) -> dict[str, Any]:
    """Every micro-batch of the generation batch once, in TRL's order; gradients add up, as its backward passes do."""
    torch.manual_seed(0)  # TRL shuffles the rows before it cuts them
    rows: Rows = made.rows
    logp, entropy = rows.logp.clone().requires_grad_(), rows.entropy.clone().requires_grad_()
    made.rows = replace(rows, logp=logp, entropy=entropy)
    losses, slices = [], []
    for _ in range(made.args.steps_per_generation):
        batch = made._prepare_inputs(prompts(rows))
        loss = made.compute_loss(POLICY, batch)
        loss.backward()
        losses.append(loss.item())
        slices.append(batch["prompt_ids"][:, 0].tolist())
        made._step += 1
    assert logp.grad is not None
    result: dict[str, Any] = {"loss": sum(losses), "norm": logp.grad.norm().item()}
    gradient = listed(logp.grad, logp.dtype)
    if logp.dtype == torch.float64:
        result["gradient"] = gradient
    if len(slices) > 1:
        result |= {"slices": slices, "slice_losses": losses}
    if entropy.grad is not None:
        result["gradient_entropy"] = listed(entropy.grad, logp.dtype)
    if "importance_sampling_ratio" in made.produced:
        result["sampler_ratio"] = listed(made.produced["importance_sampling_ratio"], logp.dtype)
    wanted = ("kl", "entropy", "policy_loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio")
    return result | {"metrics": metrics(made, *wanted)}


def acting_settings(made: Any) -> dict[str, Any]:
    """All that decides the loss, as TRL resolved it."""
    names = "loss_type importance_sampling_level beta use_bias_correction_kl epsilon delta entropy_coef"
    names += " top_entropy_quantile mask_truncated_completions off_policy_mask_threshold"
    names += " gradient_accumulation_steps steps_per_generation num_iterations"
    names += {"sapo": " sapo_temperature_pos sapo_temperature_neg"}.get(made.loss_type, "")
    names += {"vespo": " vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"}.get(made.loss_type, "")
    settings = {name: getattr(made.args, name) for name in names.split()} | {"epsilon_high": made.epsilon_high}
    settings["old"] = "given" if "old_per_token_logps" in made.produced else "own"
    if made.use_vllm:
        keys = ("mode", "clip_min", "clip_max")
        settings["sampler_correction"] = {k: getattr(made, f"vllm_importance_sampling_{k}") for k in keys}
    return settings


# ---- writing


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(values: Tensor, dtype: torch.dtype) -> Any:
    """Nested lists; a result that lost its type on the way is an error of this script."""
    assert values.dtype == dtype, f"{values.dtype} where {dtype} was to be recorded"
    return values.detach().tolist()


def metrics(made: Any, *names: str) -> dict[str, float]:
    """Means over the micro-batches of what TRL logged under these names."""
    logged = made._metrics["train"]
    return {name: sum(logged[name]) / len(logged[name]) for name in names if name in logged}


def plain(value: Any) -> Any:
    """For JSON: tensors as lists, NaN as null, results to twelve digits (inputs are rounded before they are used)."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.12g}")
    return value


def main() -> None:
    logging.disable(logging.WARNING)
    inputs, tried = loss_cases()
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(Path(temporary))
        written = {
            "versions": {name: version(name) for name in ("trl", "torch", "transformers")}
            | {"python": platform.python_version()},
            "notes": NOTES,
            "inputs": {name: dict(vars(rows)) for name, rows in inputs.items()},
            "advantages": judge_all(folder),
            "losses": [lose(folder, name, inputs[name], variant) for name, variant in tried],
        }
    TARGET.write_text(one_line_a_case(plain(written)), encoding="utf-8")


def one_line_a_case(tree: dict[str, Any]) -> str:
    """JSON whose lists of cases, and whose inputs, have a line each: a change shows which case moved."""
    parts = []
    for key, value in tree.items():
        items = value.items() if isinstance(value, dict) else ((None, each) for each in value)
        open_, close = "{}" if isinstance(value, dict) else "[]"
        lines = [(f"{json.dumps(k)}: " if k is not None else "") + json.dumps(v) for k, v in items]
        parts.append(f"{json.dumps(key)}: {open_}\n" + ",\n".join(lines) + f"\n{close}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
