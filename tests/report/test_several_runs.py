"""Any number of runs on one set of plots, from anybody: what differs, and where each stands."""

import json
from pathlib import Path

import pytest

from grpo_nb import cli, plots
from grpo_nb.plots.overlay import MOST_RUNS, looks
from grpo_nb.report.several_runs import page, several
from grpo_nb.run.run import Run, RunError
from tests.report.test_run_comparison import made
from tests.support import exported
from tests.support.strangers_run import MARKUP
from tests.support.tiny import edited, tiny_run
from tests.support.tokens import names


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [
        made(tmp_path, "a", 12),
        made(tmp_path, "b", 7, run__seed=3),
        made(tmp_path, "c", 40, run__seed=4, batch__group_size=8),
    ]


def test_settings_that_are_not_the_same_in_all(runs: list[Run]) -> None:
    found = several(runs)
    assert found.settings.set_index("setting").to_dict("index") == {
        "run.seed": {"a": "0", "b": "3", "c": "4"},
        "batch.group_size": {"a": "4", "b": "4", "c": "8"},
    }
    assert several([runs[0], runs[0]]).settings.empty and len(several([runs[0], runs[0]]).runs) == 2


def test_where_each_run_stands(runs: list[Run]) -> None:
    exported.evaluated(runs[1], "latest", 7, 0.75)
    exported.evaluated(runs[2], "step 20", 20, 0.5, "quick")
    standing = several(runs).standing.set_index("run")
    newest = [row["reward/fairness/mean"] for row in runs[0].metric_rows()[-5:]]
    assert standing.loc["a", "fairness: reward"] == pytest.approx(sum(newest) / 5)
    assert standing["step"].to_dict() == {"a": 12, "b": 7, "c": 40}
    assert standing.loc["b", "fairness: accuracy, greedy"].startswith("0.75 ")
    assert standing.loc["c", "fairness: accuracy, quick"].startswith("0.50 ")


def test_each_run_has_a_curve_of_its_own_in_each_panel(runs: list[Run]) -> None:
    figure = several(runs).figure
    drawn = {axis.get_title(loc="left"): axis.get_lines() for axis in figure.axes if axis.get_visible()}
    assert {"fairness: reward", "hallucination: KL to the reference", "gradient norm"} <= set(drawn)
    lines = drawn["fairness: reward"]
    assert [line.get_xdata()[-1] for line in lines] == [12, 7, 40]
    assert len({line.get_color() for line in lines}) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    kept = several(runs[1:], {name: look for name, look in looks("abc").items() if name != "a"}).figure
    (panel,) = [axis for axis in kept.axes if axis.get_title(loc="left") == "fairness: reward"]
    assert [line.get_color() for line in panel.get_lines()] == [line.get_color() for line in lines[1:]]
    assert plots.to_kept_png(figure).startswith(b"\x89PNG")


def test_looks_tell_all_runs_apart() -> None:
    assert len({str(look) for look in looks(list(map(str, range(MOST_RUNS)))).values()}) == MOST_RUNS


def test_none_and_too_many_are_refused(runs: list[Run]) -> None:
    for wrong in ([], [runs[0]] * (MOST_RUNS + 1)):
        with pytest.raises(RunError):
            several(wrong)
    with pytest.raises(RunError):
        several([runs[0], runs[0].path / "none"])


def test_a_run_that_cannot_be_read_hides_no_other(runs: list[Run]) -> None:
    (runs[1].path / "metrics.jsonl").unlink()
    (runs[1].path / "metrics.jsonl").mkdir()
    found = several([runs[0], Run.open(runs[1].path)])
    assert found.standing.set_index("run").loc["a", "step"] == 12 and repr(found)
    assert found.figure.axes


def test_runs_without_steps_and_without_a_shared_objective(tmp_path: Path, runs: list[Run]) -> None:
    empty = tiny_run(tmp_path, "empty")
    assert not several([empty]).figure.axes
    other = edited(tiny_run(tmp_path, "other"), objectives={"quiz": {"task": "quiz"}})
    other.log_metrics({"step": 1, "reward/quiz/mean": 0.5})
    titles = [axis.get_title(loc="left") for axis in several([runs[0], other]).figure.axes]
    assert {"fairness: reward", "quiz: reward"} <= set(titles)


def test_markup_of_a_stranger_is_text(tmp_path: Path, runs: list[Run]) -> None:
    evil = edited(tiny_run(tmp_path, "evil"), objectives__fairness__data=MARKUP)
    evil.path.rename(tmp_path / MARKUP.replace("/", ""))
    shown = page([runs[0], tmp_path / MARKUP.replace("/", ""), runs[2]])
    assert "&lt;script" in shown and "default-src" in shown
    assert not any(part in shown for part in ("<script", "<img src=x", "\x1b"))


def test_the_command_line(runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(run.path) for run in runs]
    assert cli.main(["compare", *paths]) == 0 and names(capsys.readouterr().out, "batch.group_size", "run.seed")
    assert cli.main(["compare", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == paths and len(found["standing"]) == 3
    out = tmp_path / "compared.html"
    for given in (paths, paths[:2]):
        assert cli.main(["compare", *given, "--out", str(out)]) == 0
        assert "data:image/png;base64," in out.read_text()
    assert "difference of means" in out.read_text()
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert cli.main(["compare", *paths, "--out", str(tmp_path / "log.jsonl")]) == 2
    assert cli.main(["compare", *paths, "--out", str(tmp_path / "t.csv")]) == 2 and not (tmp_path / "t.csv").exists()
    assert cli.main(["compare", *paths, "nowhere"]) == 2
