"""The tables of the mathematics notebook say what its text says."""

import pytest
import torch

from grpo_nb import combine_gradients, losses
from grpo_nb.algorithms import ALGORITHMS
from grpo_nb.plots import arrows, curves, to_png
from grpo_nb.report import toy_math

POLICY = torch.tensor([2.5, 1.0, -1.0, 0.0, -1.0], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 1.0, 2.0, 0.0, 0.0], dtype=torch.float64)


def test_every_algorithm_is_listed_with_its_choices() -> None:
    frame = toy_math.algorithms().frame
    assert list(frame["name"]) == list(ALGORITHMS)
    assert frame.set_index("name").loc["gspo", "clip"] == "0.0003, 0.0004"
    assert frame.set_index("name").loc[["sapo", "cispo_cap"], "clip"].tolist() == ["-", "-, 5"], "as far as it is used"


def test_every_estimator_of_the_advantage_is_shown_with_its_numbers() -> None:
    nan = float("nan")
    frame = toy_math.advantages(torch.tensor([[1.0, 0.0], [nan, 2.0]])).frame.set_index("advantage")
    assert list(frame.index) == list(losses.ADVANTAGES)
    assert list(frame.columns) == ["1  0", "-  2"]
    assert frame.loc["rloo"].tolist() == ["1  -1", "0  0"]


def test_value_and_gradient_of_the_kl_are_two_questions() -> None:
    lines = toy_math.kl_estimators(POLICY, REFERENCE).frame.set_index("estimator")
    for name in ("k1", "k3", "k3_k2"):
        assert lines.loc[name, "mean"] == lines.loc[name, "truth"]
    assert lines.loc["k1", "gradient: size"] == "0%"
    for name in ("k2", "k3_k2"):
        assert (lines.loc[name, "gradient: size"], lines.loc[name, "gradient: cosine"]) == ("100%", "1.00")
    assert float(lines.loc["k3", "gradient: cosine"]) < 0.9
    last = lines.iloc[-1]
    assert last["mean"] < 0.1 * last["truth"]


def test_pulls_are_those_of_the_surrogates() -> None:
    good, bad = (toy_math.pulls(A, ["ppo_clip", "cispo", "cpgd"]) for A in (1.0, -1.0))
    assert good["ppo_clip"].loc[:1.19].min() > 0 and good["ppo_clip"].loc[1.21:].abs().max() == 0
    assert bad["ppo_clip"].loc[:0.79].abs().max() == 0 and bad["ppo_clip"].iloc[-1] == pytest.approx(-8)
    assert good["cispo"].min() == pytest.approx(0.8) and good["cispo"].max() == pytest.approx(1.28)
    dual = toy_math.pulls(-1.0, ["ppo_clip"], dual=3.0)["ppo_clip"]
    assert dual.loc[3.05:].abs().max() == 0 and dual.loc[:2.95].min() < -2.8


def test_long_answers_weigh_what_the_reduction_says() -> None:
    frame = toy_math.long_answers([1, 3], 10).frame.set_index(["reduction", "length"])["weight of the answer"]
    assert frame["sequence_mean"].tolist() == ["50.0%", "50.0%"]
    assert frame["token_mean"].tolist() == ["25.0%", "75.0%"]
    assert frame["constant_length"].tolist() == ["5.0%", "15.0%"]


def test_a_conflict_shows_who_loses() -> None:
    gradients = [torch.tensor([1.0, 0.4]), torch.tensor([-2.2, 1.0])]
    frame = toy_math.conflict(gradients, [1.0, 1.0]).set_index("combine")
    assert list(frame.index) == list(combine_gradients.COMBINERS)
    assert frame.loc["sum", "progress of 1"] < 0 < frame.loc["pcgrad", "progress of 1"]


def test_a_combiner_without_its_solver_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ImportError("no solver")

    monkeypatch.setattr(combine_gradients, "COMBINERS", {"sum": combine_gradients.weighted_sum, "upgrad": missing})
    frame = toy_math.conflict([torch.tensor([1.0, 0.4]), torch.tensor([-2.2, 1.0])], [1.0, 1.0])
    assert list(frame["combine"]) == ["sum"]


def test_pictures_are_drawn() -> None:
    assert to_png(curves({"a": toy_math.kl_curves()}, "nats", mark=0.0, top=10)).startswith(b"\x89PNG")
    good = toy_math.pulls(1.0, ["ppo_clip"])
    assert to_png(curves({"a": good, "b": good}, "pull", mark=1.0, log=True)).startswith(b"\x89PNG")
    assert to_png(arrows([(1.0, 0.0), (-1.0, 1.0)], {"sum": (0.0, 1.0)})).startswith(b"\x89PNG")


def test_one_ratio_for_an_answer_or_one_for_each_token() -> None:
    gains = toy_math.per_token(["ppo_clip", "gspo", "gmpo"], [0.3, -0.1], clip=0.5).frame.set_index("surrogate")
    assert gains.loc["ppo_clip"].tolist() == [1.3499, 0.9048]
    assert gains.loc["gspo"].tolist() == gains.loc["gmpo"].tolist() == [1.1052, 1.1052]


def test_equal_steps_are_one_arrow_with_both_names() -> None:
    picture = arrows([(1.0, 0.0), (-1.0, 1.0)], {"sum": (0.0, 1.0), "a": (0.5, 1.0), "b": (0.5, 1.0 + 1e-6)})
    legend = picture.axes[0].get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()] == ["objective 1", "objective 2", "sum", "a = b"]


def test_the_numbers_of_the_text_are_those_of_the_tables() -> None:
    rewards = torch.tensor([[1.0, 0, 0, 1], [2, 2, 2, 5]])
    lengths = torch.full((2, 4), 9)
    even = toy_math.advantages(rewards, lengths).frame.set_index("advantage")
    lengths[1, 3] = 900
    long = toy_math.advantages(rewards, lengths).frame.set_index("advantage")
    moved = {name for name in even.index if even.loc[name].tolist() != long.loc[name].tolist()}
    assert moved == {"opo", "reinforce_pp", "reinforce_pp_baseline"}
    steps = toy_math.conflict([torch.tensor([1.0, 0.4]), torch.tensor([-2.2, 1.0])], [1.0, 1.0]).set_index("combine")
    if "upgrad" in steps.index:
        assert steps.loc["upgrad", "step"] == pytest.approx(steps.loc["pcgrad", "step"], abs=1e-3)


def test_a_picture_says_in_words_what_it_shows() -> None:
    assert repr(curves({"A = +1": toy_math.kl_curves()}, "nats")) == "Picture: A = +1"
    assert repr(arrows([(1.0, 0.0)], {"sum": (0.0, 1.0)})).startswith("Picture: ")
