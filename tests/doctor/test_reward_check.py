"""Gold, bad and sampled answers scored as in training, ranked, and what is wrong with a reward said beforehand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from grpo_nb.beta_control import BetaState
from grpo_nb.config import Config, ConfigError
from grpo_nb.doctor.reward_check import Answer, checked, known_bad, scored, workbench
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.report import report
from grpo_nb.rewards.rubric import RewardError, Rubric
from grpo_nb.run.run import Run
from grpo_nb.tasks import load_task
from grpo_nb.training.objectives import Objective
from grpo_nb.types import Example, Score
from tests.support.tiny import small_tasks, tiny_config, tiny_run
from tests.support.tokens import names

F, H = "fairness", "hallucination"


class Words:
    """Right is the target; the reward is the number that follows the word, if there is one: `wrong 0.3`."""

    name = "words"

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        return [Example(f"{split}/{i}", f"question {i}", target=f"right{i}") for i in range(4)]

    def score(self, example: Example, completion: str) -> Score:
        if completion == "judge down":
            return Score(value=None, cause="timed out")
        if completion == example.target:
            return Score(1.0, "correct")
        return Score(float((completion.split() or [""])[-1]) if completion[-1:].isdigit() else 0.0, "wrong")


TASK = Words()
EXAMPLES = TASK.examples("train")


def found(
    texts: Sequence[Sequence[str]], bad: str = "bad", rewards: Sequence[Any] = (), tokens: Any = None, **changes: Any
) -> dict[str, Any]:
    """The findings on these answers of the model, one list a prompt, with a gold and a bad answer each."""
    config: Config = tiny_config(**changes)
    beta = BetaState(value=0.1, mode="manual")
    objective = Objective(F, config.objectives[F], Rubric(TASK, rewards), EXAMPLES, beta)
    answers = []
    for example, own in zip(EXAMPLES, texts, strict=False):
        answers += [Answer(example, "gold", "", str(example.target), [0]), Answer(example, "bad", "made up", bad, [0])]
        sampled = [(text, [0] * (tokens or len)(text)) for text in own]
        answers += [Answer(example, "model", "", text, ids, text.startswith("cut")) for text, ids in sampled]
    frame = scored(objective, answers, config)
    return {"frame": frame} | {finding.rule: finding for finding in checked(frame, F, config)}


HEALTHY = [["wrong 0.2", "right0", "w 0.1", "right0"], ["x 0.3", "right1", "some wrong 0.1", "right1"]]


def test_a_healthy_reward_is_silent() -> None:
    assert found(HEALTHY).keys() == {"frame"}


def test_answers_are_ranked_prompt_by_prompt() -> None:
    frame = found([["wrong 0.2", "right0"], ["judge down", "x 0.4"]])["frame"]
    assert list(frame["answer"]) == ["right0", "right0", "wrong 0.2", "bad", "right1", "x 0.4", "bad", "judge down"]
    assert list(frame["rank"][:7]) == [1, 1, 3, 4, 1, 2, 3] and frame["rank"].isna().tolist() == [False] * 7 + [True]


def test_a_bad_answer_paid_like_the_gold_one_is_an_error() -> None:
    finding = found(HEALTHY, bad="made up 1")["bad_is_paid"]
    assert finding.severity == "error" and names(finding.message, 2, "'made up'", "train/0", 1)


def test_constant_rewards_are_noticed() -> None:
    assert names(found([["a", "b"], ["right1", "right1"]])["constant_reward"].message, "100%", "fairness")
    assert "constant_reward" not in found([["a", "b"], ["right1", "w"]])
    clipped = found([["a 0.2", "b 0.4"], ["a 0.3", "b 0.2"]], shaping__clip=0.1)
    assert "constant_reward" in clipped and "shaped" in clipped["frame"], "compared is what shaping leaves"


def test_a_function_that_tells_nothing_apart_is_named() -> None:
    def blind(completions: list[str], **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    def seeing(completions: list[str], **columns: Any) -> list[float]:
        return [len(c) / 10 for c in completions]

    answers = found(HEALTHY, rewards=[(blind, 0.2), (seeing, 0.0)])
    assert names(answers["constant_part"].message, "'blind'", "fairness", 0.5, 12)
    assert answers["frame"]["part/seeing"].nunique() > 1
    assert answers["frame"]["reward"].max() == pytest.approx(1.1), "with its weight"


LONG = [[f"{'w ' * n}0.{n}" for n in range(1, 8)], [f"{'w ' * n}0.{n}" for n in range(2, 9)]]


def test_a_reward_that_follows_length_inside_prompts_is_noticed() -> None:
    finding = found(LONG)["length_reward"]
    assert names(finding.message, "fairness", "+1.00", 14) and finding.evidence["correlation"] == pytest.approx(1)
    shorter = found(LONG, tokens=lambda text: 50 - len(text))["length_reward"]
    assert names(shorter.message, "-1.00") and shorter.evidence["correlation"] == pytest.approx(-1)


def test_length_that_differs_between_prompts_only_is_no_matter() -> None:
    pay = (4, 1, 6, 5, 2, 7, 3)
    long = [f"{'w ' * (20 + n)}0.{value}" for n, value in enumerate(pay)]
    short = [f"{'w ' * n}0.0{value}" for n, value in enumerate(pay)]
    assert "length_reward" not in found([long, short])
    assert "length_reward" not in found([own[:5] for own in LONG]), "ten answers may be chance"


def test_prompts_that_are_always_or_never_solved_are_listed() -> None:
    answers = found([["right0", "right0"], ["no 0.1", "no 0.2"], ["right2", "no"]])
    always, never = answers["always_solved"], answers["never_solved"]
    assert always.evidence["examples"] == ["train/0"] and never.evidence["examples"] == ["train/1"]
    assert always.severity == never.severity == "info" and names(always.message, "1 of 3", "fairness", "train/0")
    assert found([["no 0.1", "no 0.2"], ["no", "no 0.5"]])["never_solved"].severity == "warning"


@pytest.mark.parametrize(("cut", "noticed"), [(2, False), (3, True)])
def test_truncation_over_half_is_noticed(cut: int, noticed: bool) -> None:
    texts = [["cut 0.1"] * cut + [f"right0 0.{n}" for n in range(4 - cut)]]
    assert ("truncation" in found(texts)) == noticed


def test_answers_without_a_verdict_are_counted_with_the_cause() -> None:
    finding = found([["judge down", "right0"], ["x 0.1", "right1"]])["unscored"]
    assert names(finding.message, "1 of 8", "fairness", "(timed out)")


# Known bad answers


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(tiny_config().model, 0)


def test_bad_answers_are_of_the_task_and_none_is_paid_like_gold(tmp_path: Path) -> None:
    for objective in tiny_config().objectives.values():
        task = load_task(objective, tmp_path, 0)
        for example in task.examples("train")[:40]:
            texts = [text for _, text in known_bad(task, example)]
            gold = task.score(example, str(example.target)).value
            values = [task.score(example, text).value for text in texts]
            assert texts[0] == "" and texts[1] and len(texts) >= 3
            assert gold is not None and all(value is not None and value < gold for value in values)


def test_a_task_of_ones_own_gets_another_question_s_answer() -> None:
    assert [text for _, text in known_bad(TASK, EXAMPLES[1])] == ["", "question 1", "right0"]


def test_a_made_up_reply_is_a_bad_one_and_so_is_abstaining_where_the_text_tells() -> None:
    columns = {"hallucinated_response": "She made none.", "answerable": True}
    found = dict(known_bad(TASK, Example(id="x", prompt="p", target="t", columns=columns)))
    assert found["made up"] == "Answer: She made none." and found["abstaining"] == "Answer: Not stated"
    untold = Example(id="x", prompt="p", target="t", columns={**columns, "answerable": False})
    assert "abstaining" not in dict(known_bad(TASK, untold))


# On a run


def test_the_demo_before_training(tmp_path: Path, policy: Policy) -> None:
    run = tiny_run(tmp_path)
    bench = workbench(run, policy=policy, tasks=small_tasks(), prompts=2)
    answers = bench.answers
    assert set(answers["objective"]) == {F, H} and answers["example"].nunique() == 4
    assert (answers["kind"] == "model").sum() == 4 * run.config.batch.group_size
    assert (answers[answers["kind"] == "gold"]["rank"] == 1).all()
    assert {"constant_reward", "never_solved"} <= {finding.rule for finding in bench.findings}
    assert not run.rows("evaluations") and not run.rows("metrics") and run.checkpoints.steps() == []
    again = workbench(Run.open(run.path), policy=policy, tasks=small_tasks(), prompts=2)
    assert again.answers.equals(answers)


def test_own_rewards_come_with_their_weights_and_wrong_ones_are_refused(tmp_path: Path, policy: Policy) -> None:
    def short(completions: list[Any], **columns: Any) -> list[float]:
        return [-float(len(c[0]["content"])) for c in completions]

    run = tiny_run(tmp_path)
    kwargs: dict[str, Any] = {"policy": policy, "tasks": small_tasks(), "prompts": 1}
    answers = workbench(run, rewards={F: [(short, 0.01)]}, **kwargs).answers
    own = answers[answers["objective"] == F]
    assert own["reward"].tolist() == pytest.approx((own["part/task"] + 0.01 * own["part/short"]).tolist())
    with pytest.raises(ConfigError, match=r"\['fair'\]"):
        workbench(run, rewards={"fair": [short]}, **kwargs)
    with pytest.raises(RewardError, match="'<lambda>' returned 0 values"):
        workbench(run, rewards={F: [lambda completions: []]}, **kwargs)


def test_the_table_shows_equal_answers_once(tmp_path: Path, policy: Policy) -> None:
    bench = workbench(tiny_run(tmp_path), policy=policy, tasks=small_tasks(), prompts=1)
    model = bench.answers["kind"] == "model"
    bench.answers.loc[model, "answer"] = "the same"
    bench.answers.loc[model, "reward"] = 0.0
    frame = report.ranked(bench).frame
    assert frame.loc[frame["answer"] == "the same", "times"].tolist() == [4, 4]
    assert (frame["prompt"] != '"').sum() == 2 and "bad: empty" in set(frame["kind"])
    assert "the same" in report.ranked(bench)._repr_html_()
