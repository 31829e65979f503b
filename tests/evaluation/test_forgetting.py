"""The probe judges forty small questions, asks base and stage the same, and refuses models that cannot read it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_nb.doctor import diagnose
from grpo_nb.evaluation import evaluate as evaluation
from grpo_nb.evaluation import forgetting as probing
from grpo_nb.evaluation.compare import comparison
from grpo_nb.evaluation.evaluate import restore_policy
from grpo_nb.evaluation.forgetting import probe
from grpo_nb.policy.model import Policy
from grpo_nb.policy.source import ModelError
from grpo_nb.rollout import Request
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks.probe import ITEMS, Probe
from grpo_nb.types import Rollouts, Score
from tests.support import tiny_models
from tests.support.quiz import Scripted
from tests.support.tiny import tiny_run
from tests.support.tokens import names, pattern

TASK = Probe()
EXAMPLES = TASK.examples("test")
GOLD = [str(example.target) for example in EXAMPLES]


def by_question(start: str) -> int:
    (number,) = [n for n, item in enumerate(ITEMS) if item.question.startswith(start)]
    return number


def label(start: str, reply: str) -> str:
    return TASK.score(EXAMPLES[by_question(start)], reply).label


# The questions


def test_forty_different_questions_five_kinds_of_eight() -> None:
    kinds = [item.kind for item in ITEMS]
    assert len(ITEMS) == 40 == len({item.question for item in ITEMS}) == len({e.id for e in EXAMPLES})
    assert {kinds.count(kind) for kind in kinds} == {8} and len(set(kinds)) == 5
    assert TASK.examples("train") == []
    TASK.selfcheck()


def test_a_measure_of_one_kind_is_over_its_eight() -> None:
    parts = TASK.support(EXAMPLES, [])
    assert {sum(part) for part in parts.values()} == {8} and sum(map(sum, parts.values())) == 40
    assert parts.keys() == TASK.summary(EXAMPLES, [Score(value=0.0)] * 40).keys() - {"accuracy"}


REPEAT = "Repeat the following line exactly, and write nothing else.\n"


@pytest.mark.parametrize(
    ("start", "reply", "right"),
    [
        ("What is 7 plus 5", "12", True),
        ("What is 7 plus 5", "Answer: 12.", True),
        ("What is 7 plus 5", "7 plus 5 is twelve.", True),
        ("What is 7 plus 5", "112", False),
        ("What is 7 plus 5", "", False),
        ("What is the capital", "The capital of France is Paris.", True),
        ("What is the capital", "Lyon", False),
        ('Which word completes the sentence "She opened', "It began to rain.", True),
        ('Which word completes the sentence "She opened', "sing, rain, burn", False),
        ('Which word completes the sentence "She opened', "training", False),
        (f"{REPEAT}The Green", "The Green door, not the Red one", True),
        (f"{REPEAT}The Green", "The green door, not the red one", False),
        (f"{REPEAT}yes", '"yes; no; perhaps"', True),
        (f"{REPEAT}yes", "Sure! yes; no; perhaps", False),
        ("Write the word river", "RIVER.", True),
        ("Write the word river", "River", False),
        ("Write the numbers from 1", "1,2,3,4,5", True),
        ("Write the numbers from 1", "1 2 3 4 5", False),
        ("Answer with yes or no", "No, it is not.", True),
        ("Answer with yes or no", "Yes. It is not.", False),
        ("Reply with the last word", "**Answer:** table", True),
    ],
)  # fmt: skip
def test_replies_are_judged_by_what_they_say(start: str, reply: str, right: bool) -> None:
    assert label(start, reply) == ("correct" if right else "wrong")


def test_the_summary_is_by_kind() -> None:
    scores = [TASK.score(e, e.target if e.columns["kind"] == "facts" else "") for e in EXAMPLES]  # type: ignore[arg-type]
    found = TASK.summary(EXAMPLES, scores)
    assert found["accuracy"] == 0.2 and found["accuracy_facts"] == 1 and found["accuracy_copying"] == 0
    facts = [e for e in EXAMPLES if e.columns["kind"] == "facts"]
    assert TASK.summary(facts, [Score(1.0, "correct")] * 8).keys() == found.keys(), "a draw may lack a kind"


# Asking


def bytewise() -> PreTrainedTokenizerFast:
    """Reads any text, byte by byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    index = {token: n for n, token in enumerate((*tiny_models.SPECIAL, *alphabet))}
    inner = Tokenizer(models.BPE(vocab=index, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in tiny_models.SPECIAL])
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=tiny_models.TEMPLATE, **names)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = bytewise()
    return tiny_models.folder(
        tmp_path_factory.mktemp("model"), tokens=tokens, vocab_size=len(tokens), max_position_embeddings=512
    )


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "RESAMPLES", 200)


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Run:
    run = tiny_run(tmp_path, model__name=str(model), sft__steps=0)
    policy = restore_policy(run, "base")
    run.checkpoints.save(2, {"policy": {k: v + 0.5 for k, v in policy.state().items()}}, {"step": 2})
    return run


class ByWeights(Scripted):
    """Answers as many questions as the stage's weights say; remembers them and the sampling."""

    def __init__(self, base: int, later: int) -> None:
        super().__init__(str)
        self.right, self.first = {}, None  # type: ignore[var-annotated]
        self.base, self.later, self.seen = base, later, []  # type: ignore[var-annotated]

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        value = float(next(iter(policy.state().values())).flatten()[0])
        self.first = value if self.first is None else self.first
        count = self.base if value == self.first else self.later
        self.seen.append((request.sampling, request.greedy))
        texts = [text if i < count else "?" for i, text in enumerate(GOLD)]
        return Rollouts(request.prompt_ids, [[0]] * 40, [[0.0]] * 40, ["stop"] * 40, texts, 1)


def accuracy(frame: Any) -> Any:
    return frame[frame["metric"] == "accuracy"].iloc[0]


def stages(run: Run) -> list[tuple[str, int]]:
    return [(row["stage"], row["step"]) for row in run.rows("evaluations")]


def test_base_and_stage_answer_the_same_questions(run: Run) -> None:
    engine = ByWeights(base=30, later=12)
    line = accuracy(probe(run, engine=engine))
    assert (line["before"], line["after"], line["n"], line["differs"]) == (0.75, 0.3, 40, True)
    assert line["difference"] == pytest.approx(-0.45) and line["difference_high"] < 0
    assert stages(run) == [("base", 0), ("latest", 2)]
    assert all(s == (probing.SAMPLING, True) for s in engine.seen), "neither the run's cap nor its sampling"
    probe(run, 2, engine=engine)
    assert stages(run)[2:] == [("step 2", 2)], "the base is asked once"


def test_probe_rows_are_no_evaluation_of_the_objectives(run: Run) -> None:
    probe(run, engine=ByWeights(30, 12))
    assert comparison(run).empty and {row["objective"] for row in run.rows("evaluations")} == {"probe"}


def test_the_base_alone(run: Run) -> None:
    line = accuracy(probe(run, "base", engine=ByWeights(30, 12)))
    assert (line["before"], line["difference"], line["differs"]) == (0.75, 0.0, False) and stages(run) == [("base", 0)]


def test_a_real_engine_answers_too(run: Run) -> None:
    frame = probe(run, 2)
    assert frame["n"].tolist() == [40, *[8] * 5] and accuracy(frame)["before"] <= 0.2


def test_a_stage_that_is_not_there_is_said_before_any_work(run: Run) -> None:
    with pytest.raises(RunError, match=r"\b9\b"):
        probe(run, 9)
    assert stages(run) == []


def test_the_demo_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "demo")
    with pytest.raises(ModelError, match=pattern("'demo'", 40)):
        probe(run, "base")
    assert stages(run) == []


# The rule


Answer = Callable[[int], bool]


def logged(run: Run, stage: str, right: Answer) -> None:
    texts = [text if right(i) else "?" for i, text in enumerate(GOLD)]
    where: dict[str, Any] = {"stage": stage, "step": 0 if stage == "base" else 2, "split": "test", "mode": "probe"}
    run.log_evaluation(where | evaluation.measured(run, "probe", TASK, EXAMPLES, texts))


def forgets(run: Run) -> Sequence[Any]:
    return [finding for finding in diagnose(run) if finding.rule == "forgetting"]


@pytest.mark.parametrize(("lost", "found"), [(0, 0), (2, 0), (16, 1)])
def test_a_fall_that_is_no_chance_is_a_finding(run: Run, lost: Literal[0, 2, 16], found: int) -> None:
    logged(run, "base", lambda i: i < 32)
    logged(run, "latest", lambda i: lost <= i < 32)
    assert len(forgets(run)) == found


def test_the_finding_names_what_fell_and_the_newest_probe_counts(run: Run) -> None:
    logged(run, "base", lambda i: i < 32)
    logged(run, "latest", lambda i: 8 <= i < 32)
    (finding,) = forgets(run)
    assert (finding.severity, finding.step, finding.evidence["kinds"]) == ("warning", 2, ["arithmetic"])
    assert names(finding.message, "latest", "60%", 40, "base", "80%", "arithmetic")
    logged(run, "base", lambda i: i < 32)
    assert forgets(run) == [finding], "the base asked again is no newer stage"
    logged(run, "step 1", lambda i: i < 34)
    assert not forgets(run)


def test_a_gain_is_none_and_neither_is_a_probe_without_its_base(run: Run) -> None:
    logged(run, "latest", lambda i: i < 2)
    assert not forgets(run)
    logged(run, "base", lambda i: False)
    assert not forgets(run)
