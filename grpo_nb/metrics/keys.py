"""Table of the keys of metrics.jsonl and sft.jsonl, each with its unit, its meaning, and the file that computes it.

A key is a name, `keys.LOSS`, or a family with fields, `keys.KL.of("fairness")`. Nothing else in the package spells one.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

from grpo_nb.suggest import did_you_mean

TEXT, SHARE = "text", "share"
"""Unit of texts; unit of numbers between 0 and 1."""

_FIELD = re.compile(r"\{\w+\}")


@dataclass(frozen=True)
class Key:
    """One row of the table; a name with fields in braces is a family of keys."""

    name: str
    unit: str
    meaning: str
    producers: tuple[str, ...]
    """Files of the package that compute it."""

    def of(self, *fields: str) -> str:
        """The key with these fields, all of them.

        >>> KL.of("fairness")
        'kl/fairness'

        Raises:
            TypeError: too few or too many.
        """
        return self._format % fields

    def below(self, *fields: str) -> str:
        """Prefix of the keys with these first fields.

        >>> LABEL.below("fairness")
        'label/fairness/'
        """
        return "%s".join(self._format.split("%s")[: len(fields) + 1]) % fields

    def has(self, key: str) -> bool:
        """Whether a key belongs to this row, and to no other."""
        return row_of(key) is self

    @cached_property
    def _format(self) -> str:
        return _FIELD.sub("%s", self.name)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(".*".join(map(re.escape, self._format.split("%s"))), re.DOTALL)


@dataclass(frozen=True)
class Difference:
    """Keys of |Δ log p| over tokens."""

    mean: str
    p99: str
    far: str


_rows: dict[str, Key] = {}


def _family(name: str, unit: str, meaning: str, *producers: str) -> Key:
    return _rows.setdefault(name, Key(name, unit, meaning, producers))


def _one(name: str, unit: str, meaning: str, *producers: str) -> str:
    return _family(name, unit, meaning, *producers).name


def _difference(name: str, what: str, *producers: str) -> Difference:
    return Difference(
        _one(name, "nats", f"Mean |Δ log p| per token {what}.", *producers),
        _one(f"{name}_p99", "nats", f"99th percentile of |Δ log p| {what}.", *producers),
        _one(f"{name}_far", SHARE, f"Tokens with |Δ log p| above 2, beyond any rounding, {what}.", *producers),
    )


_STEP, _METRICS, _SFT = "training/grpo.py", "training/metrics.py", "training/sft.py"
_REPORT, _JUDGE, _TEXTS = "training/gradient_report.py", "judge/tally.py", "training/texts.py"
_AHEAD = "training/ahead.py"
_CHECK = "training/gradient_check.py"
_ROLLBACK, _OVERFLOW = "training/rollback.py", "training/overflow_report.py"

# The step

STEP = _one("step", "", "Number of the step, from 1.", _STEP, _SFT)
STATUS = _one(
    "status", TEXT, "What became of the updates: ok, clipped, skipped, empty, or rolled_back.", _METRICS, _SFT
)
ENGINE = _one(
    "engine", TEXT, "What drew the completions: a name of rollout.engine, or the class of an own engine.", _STEP
)
LR = _one("lr", "", "Learning rate of the step.", _STEP, _SFT)
LR_REQUESTED = _one("lr/requested", "", "The rate that the step would have had without a rollback.", _ROLLBACK)
TEMPERATURE = _one("temperature", "", "Sampling temperature of the step.", _STEP)
TOKENS = _one("tokens", "tokens", "Completion tokens of the step, stop tokens included.", _STEP, _SFT)
ROUNDING = _one("rounding", "", "Step at 1 of the number type that the forward pass computes in.", _STEP)
MEMORY_PEAK = _one("memory/peak_mib", "MiB", "Peak memory: GPU allocator's, or the process's on CPU.", _STEP, _SFT)
MEMORY_NOW = _one("memory/now_mib", "MiB", "Memory held at the end of the step: as above, now.", _STEP)
POSITIONS = _one("positions", TEXT, "What shifts the positions of all rows of a batch, where something does.", _STEP)
TIME = _family("time/{phase}", "s", "Seconds in a phase: rollout, score, reference, train, eval.", _METRICS)
TIME_STEP = _one("time/step", "s", "Seconds of the step.", _METRICS)
TIME_RANK = _family("time/rank/{rank}", "s", "Seconds of the step in which a rank, of several, worked.", _METRICS)
TIME_RANKS_WAITED = _one("time/ranks_waited", "s", "Seconds in which the mean rank waited for the slowest.", _METRICS)
MEMORY_RANK = _family("memory/rank/{rank}", "MiB", "Peak memory of each rank other than rank 0.", _METRICS)

# Loss, ratio, gradient

LOSS = _one("loss", "", "Loss, mean over the step's updates; of SFT: nats per completion token.", _METRICS, _SFT)
LOSS_TERM = _family("loss/{term}", "", "Part of the loss: policy, kl, or entropy.", _METRICS)
RATIO_MAX_DEVIATION = _one("ratio/max_deviation", "", "max |π_new / π_old - 1| at the first update.", _METRICS)
RATIO_DIFFERENCE = _difference("ratio/logp_difference", "between policy and old policy at the first update", _METRICS)
RATIO_CLAMPED = _one("ratio/clamped", SHARE, "Tokens whose log-ratio is beyond the clamp before exp.", _METRICS)
CLIP_RATIO_LOW = _one("clip_ratio/low", SHARE, "Tokens clipped at the lower bound of the ratio.", _METRICS)
CLIP_RATIO_HIGH = _one("clip_ratio/high", SHARE, "Tokens clipped at the upper bound of the ratio.", _METRICS)
CLIP_RATIO_LOW_OF = _family(
    "clip_ratio/low/{pass}", "share", "The same in one pass over the rollouts, from 1, of several.", _METRICS
)
CLIP_RATIO_HIGH_OF = _family("clip_ratio/high/{pass}", "share", "As clip_ratio/low/{pass}, above.", _METRICS)
GRAD_NORM = _one("grad/norm", "", "Largest gradient norm of the step's updates, before clipping.", _METRICS, _SFT)
GRAD_UPDATE = _one("grad/update", "", "Relative change of the weights, ||new - old|| / ||old||.", _METRICS, _SFT)
GRAD_SKIPPED = _one("grad/skipped", "updates", "Updates that were skipped.", _METRICS)
GRAD_NORM_OF = _family("grad/norm/{objective}", "", "Norm of one objective's gradient.", _METRICS, _REPORT)
GRAD_NORM_TERM = _family(
    "grad/norm/{objective}/{term}", "", "Norm of the gradient of one term of one objective's loss.", _REPORT
)
GRAD_CHECK = _one(
    "grad/check", "", "Step 1: ||accumulated - expected|| / ||expected|| of the first update's gradient.", _CHECK
)
GRAD_CHECK_RATIO = _one(
    "grad/check_ratio", "", "Step 1: ||accumulated|| / ||expected|| of the first update's gradient.", _CHECK
)
GRAD_CHECK_ENTROPY = _one(
    "grad/check_entropy", "", "Step 1: rise of the entropy along its bonus's gradient, over the expected rise.", _CHECK
)
GRAD_COSINE = _one("grad/cosine", "", "Smallest cosine between two objectives' gradients.", _METRICS, _REPORT)
GRAD_COSINE_OF = _family("grad/cosine/{a}/{b}", "", "Cosine between two objectives' gradients.", _REPORT)
HEALTH_KL = _one(
    "health/kl", "nats/token", "KL to the reference after the updates, few tokens; where it may have grown.", _ROLLBACK
)
ROLLBACKS = _one("rollback/in_a_row", "steps", "Rollbacks up to here without a healthy step between.", _ROLLBACK)
STREAM = _one("rollback/stream", "", "Number of the sampling stream: the rollbacks of the run so far.", _ROLLBACK)
OVERFLOW_LAYER = _one("overflow/layer", TEXT, "First layer whose output is not finite; empty: none.", _OVERFLOW)
OVERFLOW_DTYPE = _one("overflow/dtype", TEXT, "Number type of its output.", _OVERFLOW)
OVERFLOW_LARGEST = _one("overflow/largest", "", "Largest finite |x| that the layer was given.", _OVERFLOW)
SAMPLER_DIFFERENCE = _difference("sampler_logp_difference", "between engine and training forward", _METRICS)
STALENESS = _one(
    "staleness", "steps", "Updates between the weights that drew the completions and those that they train.", _AHEAD
)
IMPORTANCE_WEIGHT_MEAN = _one("importance_weight/mean", "", "Mean weight of the trained tokens.", _METRICS)
IMPORTANCE_WEIGHT_ZERO = _one("importance_weight/zero", SHARE, "Trained tokens of weight 0.", _METRICS)

# Each objective: rewards and answers

REWARD = _family("reward/{objective}/mean", "reward", "Mean over the scored completions, before shaping.", _METRICS)
REWARD_STD = _family(
    "reward/{objective}/std", "reward", "Standard deviation inside a group, mean over complete groups.", _METRICS
)
REWARD_SHAPED = _family("reward/{objective}/shaped", "reward", "Mean after shaping, as advantages see it.", _METRICS)
REWARD_PART = _family("reward/{objective}/part/{part}", "reward", "Mean of one reward function.", _METRICS)
REWARD_PART_STD = _family(
    "reward/{objective}/part_std/{part}",
    "reward",
    "Standard deviation of one reward function inside a group, mean over complete groups.",
    _METRICS,
)
REWARD_PART_LENGTH = _family(
    "reward/{objective}/part_length/{part}",
    "",
    "Rank correlation of one reward function with completion length, over the step's completions.",
    _METRICS,
)
SCORED = _family("scored/{objective}", SHARE, "Completions with a reward.", _METRICS)
UNSCORED_GROUPS = _family("unscored_groups/{objective}", "groups", "Groups left out: a reward is missing.", _METRICS)
FRAC_REWARD_ZERO_STD = _family(
    "frac_reward_zero_std/{objective}",
    SHARE,
    "Groups without signal, of those with all rewards: no completion has a trained token whose advantage is not 0.",
    _METRICS,
)
FRAC_ZERO_STD_EXPECTED = _family(
    "frac_reward_zero_std_expected/{objective}",
    SHARE,
    "Groups that are expected to be all right or all wrong: mean of p^K + (1 - p)^K over the prompts, with the share p "
    "of right answers of each.",
    _METRICS,
)
BAD_ROWS = _family(
    "bad_rows/{objective}", "completions", "Completions left out of the loss: a log-prob is not finite.", _STEP
)
ADVANTAGE_CLIPPED = _family(
    "advantage_clipped/{objective}", SHARE, "Trained completions cut by algorithm.advantage_clip.", _METRICS
)
LABEL = _family("label/{objective}/{label}", SHARE, "Completions with this label.", _METRICS)
LABEL_ANSWERABLE = _family(
    "label_answerable/{objective}/{label}", SHARE, "The same, of the items whose text answers the question.", _METRICS
)
LABEL_UNANSWERABLE = _family(
    "label_unanswerable/{objective}/{label}", SHARE, "The same, of the items whose text does not.", _METRICS
)
TEMPLATE = _family(
    "template/{objective}", SHARE, "Completions that are not right and the same text as another prompt's.", _TEXTS
)
EVASIVE = _family(
    "evasive/{objective}", SHARE, "Completions that are not right and refuse or evade in so many words.", _TEXTS
)
LENGTH_MEAN = _family("length/{objective}/mean", "tokens", "Mean completion length, stop token included.", _METRICS)
LENGTH_P50 = _family("length/{objective}/p50", "tokens", "Median completion length.", _METRICS)
LENGTH_P95 = _family("length/{objective}/p95", "tokens", "95th percentile of completion length.", _METRICS)
TRUNCATION = _family("truncation/{objective}", SHARE, "Completions that hit the length cap.", _METRICS)
EVAL = _family("eval/{objective}/{metric}", "", "Metric of the quick evaluation.", "training/quick_eval.py")
USER = _family("user/{objective}/{name}", "", "What a reward function gave to `log_metric`.", "rewards/context.py")

# Each objective: policy and reference

KL = _family("kl/{objective}", "nats/token", "KL to the reference by the run's estimator, before the update.", _METRICS)
KL_K1 = _family("kl_k1/{objective}", "nats/token", "The same by estimator k1, which has a sign.", _METRICS)
KL_K2 = _family(
    "kl_k2/{objective}", "nats/token", "The same as half of the squared log-ratio, whatever algorithm.kl is.", _METRICS
)
LOG_RATIO_CLAMPED = _family(
    "log_ratio_clamped/{objective}",
    SHARE,
    "Tokens whose log-ratio to the reference is beyond algorithm.log_ratio_clamp, before exp.",
    _METRICS,
)
ENTROPY = _family("entropy/{objective}", "nats/token", "Entropy of the policy on its own completions.", _METRICS)
BETA = _family("beta/{objective}", "", "Weight of the KL penalty in the step; also the name of its knob.", _STEP)
BETA_MODE = _family("beta_mode/{objective}", TEXT, "Who sets beta: auto (its controller) or manual.", _STEP)

# Each objective with a judge

JUDGE_SCORED = _family("judge/{objective}/scored", "completions", "Completions with a verdict.", _JUDGE)
JUDGE_FAILED = _family("judge/{objective}/failed", "completions", "Completions without a verdict.", _JUDGE)
JUDGE_FAILURE = _family("judge/{objective}/failure/{kind}", "completions", "The same, by kind of failure.", _JUDGE)
JUDGE_CAUSE = _family("judge/{objective}/cause", TEXT, "Most frequent cause of a failure.", _JUDGE)
JUDGE_UNREADABLE = _family("judge/{objective}/unreadable", "replies", "Replies that hold no verdict.", _JUDGE)
JUDGE_DROPPED = _family(
    "judge/{objective}/dropped_groups", "groups", "Groups that no provider judged completely.", _JUDGE
)
JUDGE_TIED = _family("judge/{objective}/tied_groups", "groups", "Groups of equal task score, to rounding.", _STEP)
JUDGE_PROVIDER = _family(
    "judge/{objective}/provider/{provider}", "completions", "Completions judged by a provider.", _JUDGE
)
JUDGE_FIRST = _family("judge/{objective}/first_provider", SHARE, "Verdicts that came from the first provider.", _JUDGE)
JUDGE_LOW = _family("judge/{objective}/low", "reward", "Lowest score given.", _JUDGE)
JUDGE_HIGH = _family("judge/{objective}/high", "reward", "Highest score given.", _JUDGE)
JUDGE_DISTINCT = _family("judge/{objective}/distinct_per_100", "", "Distinct scores per 100 verdicts.", _JUDGE)
JUDGE_AGREEMENT = _family(
    "judge/{objective}/agreement", "", "Rank correlation of the judge's score with the task's.", _JUDGE
)
JUDGE_LENGTH = _family(
    "judge/{objective}/length_correlation", "", "Rank correlation of the judge's score with length.", _JUDGE
)
JUDGE_ASKED = _family("cost/judge_asked/{objective}", "requests", "Requests sent in the step.", _JUDGE)
JUDGE_CACHED = _family("cost/judge_cached/{objective}", "texts", "Texts whose verdict was in the cache.", _JUDGE)
JUDGE_LIMITED = _family("cost/judge_limited/{objective}", "replies", "Requests refused as too many.", _JUDGE)
JUDGE_TOKENS = _family("cost/judge_tokens/{objective}", "tokens", "Tokens spent since the run began.", _JUDGE)
JUDGE_USD = _family("cost/judge_usd/{objective}", "USD", "Money spent since the run began.", _JUDGE)
TIME_JUDGE = _family("time/judge/{objective}", "s", "Seconds from the last completion to the last verdict.", _JUDGE)
TIME_JUDGE_P50 = _family("time/judge_p50/{objective}", "s", "Median of a request.", _JUDGE)
TIME_JUDGE_P95 = _family("time/judge_p95/{objective}", "s", "95th percentile of a request.", _JUDGE)

TABLE: Mapping[str, Key] = _rows
"""All rows by name, in the order in which the documentation lists them."""


def counted_with(key: str, found: Iterable[str]) -> list[str]:
    """Keys among `found` that a row has only if it also counts `key`; a row with one of them but no `key` counted 0.

    A label, a kind of failure or a provider has a key only in the rows in which it occurred. Empty for every other kind
    of key, which is missing where it was not measured.

    >>> counted_with("label/fairness/wrong", ["loss", "label/fairness/correct"])
    ['label/fairness/correct']
    """
    row = row_of(key)
    if row is None or row.name not in _COUNTED:
        return []
    objective = key.split("/")[1]
    prefix = (_COUNTED[row.name] or row).below(objective)
    return [other for other in found if other.startswith(prefix)]


_COUNTED: Mapping[str, Key | None] = {
    **dict.fromkeys((LABEL.name, LABEL_ANSWERABLE.name, LABEL_UNANSWERABLE.name)),
    **dict.fromkeys((JUDGE_FAILURE.name, JUDGE_PROVIDER.name), JUDGE_SCORED),
}
"""Families of counts, and the key of the rows in which something could be counted; None: another key of the family."""


@lru_cache(maxsize=20_000)
def row_of(key: str) -> Key | None:
    """The row of the table that a key belongs to: of several matches, the one with the most literal text."""
    found = [row for row in _by_head().get(key.partition("/")[0], ()) if row._pattern.fullmatch(key)]
    return max(found, key=lambda row: len(row._format), default=None)


@cache
def _by_head() -> Mapping[str, list[Key]]:
    rows: dict[str, list[Key]] = {}
    for row in TABLE.values():
        rows.setdefault(row.name.partition("/")[0], []).append(row)
    return rows


def check(row: Iterable[str]) -> None:
    """Refuse a row with a key that is not in the table.

    Raises:
        ValueError: names the first such key.
    """
    if unknown := [key for key in row if row_of(key) is None]:
        raise ValueError(
            f"metric '{unknown[0]}' is not in the table of grpo_nb/metrics/keys.py; log a key of the table, numbers "
            f"of your own as '{USER.name}'{did_you_mean(unknown[0], TABLE)}"
        )
