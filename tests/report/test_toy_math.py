"""The tables of the mathematics notebook say what its text says."""

import pytest
import torch

from grpo_nb import combine_gradients
from grpo_nb.algorithms import ALGORITHMS
from grpo_nb.plots import arrows, curves, to_png
from grpo_nb.report import toy_math


def test_every_algorithm_is_listed_with_its_choices() -> None:
    frame = toy_math.algorithms().frame
    assert list(frame["name"]) == list(ALGORITHMS)
    assert frame.set_index("name").loc["gspo", "clip"] == "0.0003, 0.0004"
    assert frame.set_index("name").loc[["sapo", "cispo_cap"], "clip"].tolist() == ["-", "-, 5"], "as far as it is used"


def test_pulls_are_those_of_the_surrogates() -> None:
    good, bad = (toy_math.pulls(A, ["ppo_clip", "cispo", "cpgd"]) for A in (1.0, -1.0))
    assert good["ppo_clip"].loc[:1.19].min() > 0 and good["ppo_clip"].loc[1.21:].abs().max() == 0
    assert bad["ppo_clip"].loc[:0.79].abs().max() == 0 and bad["ppo_clip"].iloc[-1] == pytest.approx(-8)
    assert good["cispo"].min() == pytest.approx(0.8) and good["cispo"].max() == pytest.approx(1.28)
    dual = toy_math.pulls(-1.0, ["ppo_clip"], dual=3.0)["ppo_clip"]
    assert dual.loc[3.05:].abs().max() == 0 and dual.loc[:2.95].min() < -2.8


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


def test_equal_steps_are_one_arrow_with_both_names() -> None:
    picture = arrows([(1.0, 0.0), (-1.0, 1.0)], {"sum": (0.0, 1.0), "a": (0.5, 1.0), "b": (0.5, 1.0 + 1e-6)})
    legend = picture.axes[0].get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()] == ["objective 1", "objective 2", "sum", "a = b"]


def test_a_picture_says_in_words_what_it_shows() -> None:
    assert repr(curves({"A = +1": toy_math.kl_curves()}, "nats")) == "Picture: A = +1"
    assert repr(arrows([(1.0, 0.0)], {"sum": (0.0, 1.0)})).startswith("Picture: ")
