"""A study trains what is left, shares SFT where it is the same, and compares arms over seeds."""

import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb import presets
from grpo_nb.cli import main
from grpo_nb.config import Config, ConfigError
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.settings import plain
from grpo_nb.sweeps import Arm, Study, sweep, work
from grpo_nb.sweeps.shared_sft import same_sft
from tests.support.tokens import names

TINY = {
    **{"sft.steps": 1, "sft.batch": 2, "sft.micro_batch": 2, "sft.warmup_steps": 0, "run.eval_examples": 2},
    **{"batch.prompts": 2, "batch.group_size": 2, "batch.micro_batch": 4, "run.steps": 1, "run.checkpoint_every": 1},
    **{"run.quick_eval_every": 0, "sampling.max_completion_length": 2},
}
NO_KL = {"objectives.fairness.beta": 0, "objectives.fairness.kl_band": None}


def tiny() -> Config:
    return presets.demo().replace(**TINY)


class Pretended:
    """A process whose work leaves what later parts look for, when somebody waits for it."""

    def __init__(self, command: list[str], **_: Any) -> None:
        self.command, self.signals = command[3:], []  # after `python -m grpo_nb`
        STARTED.append(self)

    def wait(self, timeout: float | None = None) -> int:
        verb, path, *rest = self.command
        return FAILS.get(verb) or int(getattr(self, verb)(Run.open(path), *rest) or 0)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def sft(self, run: Run) -> None:
        steps = run.config.sft.steps
        run.sft_checkpoints.save(steps, {"policy": {"w": torch.ones(1)}}, {"step": steps, "config": plain(run.config)})

    def train(self, run: Run) -> None:
        run.checkpoints.save(1, {"policy": {"w": torch.ones(1)}}, {"step": 1})

    def eval(self, run: Run, _: str, stage: str) -> None:
        for objective in run.config.objectives:
            run.log_evaluation(evaluated(stage, objective, 0.5))


def evaluated(stage: str, objective: str, value: float) -> dict[str, Any]:
    numbers = {"value": value, "low": value - 0.02, "high": value + 0.02, "n": 40, "clusters": 20, "effective": 20.0}
    row = {"stage": stage, "step": 1, "split": "test", "mode": "greedy", "objective": objective, "n": 40}
    drawn = [value + 0.01 * (n % 2) for n in range(1000)]
    asked = {"asked": "q", "pool": "p", "clusters": 20}
    return {**row, **asked, "metrics": {"accuracy": numbers}, "resamples": {"accuracy": drawn}}


STARTED: list[Pretended] = []
FAILS: dict[str, int] = {}
"""What commands end with in place of their work."""


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[Pretended]:
    monkeypatch.setattr(subprocess, "Popen", Pretended)
    STARTED.clear()
    FAILS.clear()
    return STARTED


ARMS = {"usual": {}, "no-kl": NO_KL, "sft": Arm(grpo=False)}


def test_a_study_is_done_once_and_sft_once_a_seed(tmp_path: Path, pretended: list[Pretended]) -> None:
    study = sweep(tmp_path / "kl", tiny(), ARMS, seeds=[3])
    assert {row["left"] for row in study.status().frame.to_dict("records")} >= {"sft, train, eval latest"}
    assert not any(study.train().frame["left"])
    done = [(process.command[0], Path(process.command[1]).name, *process.command[3:]) for process in pretended]
    assert done == [
        *(("sft", "usual-3"), ("train", "usual-3")),
        *(("eval", "usual-3", stage) for stage in ("base", "sft", "latest")),
        *(("train", "no-kl-3"), ("eval", "no-kl-3", "latest"), ("eval", "sft-3", "sft")),
    ]
    (event,) = Run.open(tmp_path / "kl" / "no-kl-3").stored("events").having("kind", {"sft_adopted"})
    assert (event["of"], event["sft_steps"]) == ("usual-3", 1)
    pretended.clear()
    assert not any(sweep(tmp_path / "kl").train(jobs=2).frame["left"]) and not pretended
    assert names(repr(study.table()), "usual, base", "no-kl, latest", "sft, sft", "fairness", "accuracy")


def test_each_sft_is_trained_and_measured_once(tmp_path: Path, pretended: list[Pretended]) -> None:
    arms = {"usual": {}, "no-kl": NO_KL, "longer": {"sft.steps": 2}, "alone": Arm(changes={"sft.steps": 3}, grpo=False)}
    sweep(tmp_path / "kl", tiny(), arms, seeds=[3]).train()
    done = [(process.command[0], Path(process.command[1]).name, *process.command[3:]) for process in pretended]
    assert {name for verb, name, *stage in done if stage == ["sft"]} == {"usual-3", "longer-3", "alone-3"}
    assert sorted(name for verb, name, *_ in done if verb == "sft") == ["alone-3", "longer-3", "usual-3"]


def test_some_arms_are_trained_before_others_and_share_their_sft(tmp_path: Path, pretended: list[Pretended]) -> None:
    study = sweep(tmp_path / "kl", tiny(), ARMS, seeds=[3])
    left = study.train(arms=["no-kl"]).frame.set_index("arm")["left"]
    assert not left["no-kl"] and left["usual"]
    assert not any(study.train().frame["left"])
    assert [Path(p.command[1]).name for p in pretended if p.command[0] == "sft"] == ["no-kl-3"]
    with pytest.raises(ConfigError) as refused:
        study.train(arms=["no_kl"])
    assert names(str(refused.value), "no_kl", "no-kl")


def test_what_is_measured_is_not_trained_again_without_its_checkpoints(
    tmp_path: Path, pretended: list[Pretended]
) -> None:
    study = sweep(tmp_path / "kl", tiny(), ARMS, seeds=[3])
    study.train()
    began = len(pretended)
    for run in (trial.run() for trial in study.trials):
        assert run is not None
        for name in ("checkpoints", "sft"):
            shutil.rmtree(run.path / name, ignore_errors=True)
    assert not any(study.train().frame["left"]) and len(pretended) == began


def test_one_trains_the_sft_that_others_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, both = [], threading.Event()

    class Long(Pretended):
        def wait(self, timeout: float | None = None) -> int:
            begun.append((self.command[0], Path(self.command[1]).name))
            if {("sft", "usual-3"), ("sft", "longer-3")} <= {*begun}:  # either may be the first of the two
                both.set()
            assert both.wait(20)  # the second SFT begins although a run that waits for the first comes before it
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Long)
    STARTED.clear()
    FAILS.clear()
    study = sweep(tmp_path / "kl", tiny(), {"usual": {}, "no-kl": NO_KL, "longer": {"sft.steps": 2}}, seeds=[3])
    assert not any(study.train(jobs=2).frame["left"])
    assert ("sft", "no-kl-3") not in begun


@pytest.mark.slow
def test_a_real_study_trains_measures_and_compares(tmp_path: Path) -> None:
    study = sweep(tmp_path / "kl", tiny(), ARMS, seeds=[0, 1])
    assert not any(study.train(jobs=2).frame["left"])
    frame = study.results()
    assert {*frame["arm"]} == {*ARMS} and (frame["seeds"] == 2).all()
    assert names(repr(study.table()), "seconds", "peak GiB") and len(study.plot().axes) == 2
    usual, other = (Run.open(tmp_path / "kl" / name).rows("metrics")[0] for name in ("usual-0", "no-kl-0"))
    assert usual["reward/fairness/mean"] == other["reward/fairness/mean"]  # the same SFT, prompts and luck
    first, second = (Run.open(tmp_path / "kl" / f"{arm}-0").sft_checkpoints.latest()[0] for arm in ("usual", "sft"))
    weights = [one.tensors("policy") for one in (first, second) if one]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_that_fails_leaves_the_others(
    tmp_path: Path, pretended: list[Pretended], caplog: pytest.LogCaptureFixture
) -> None:
    study = sweep(tmp_path / "kl", tiny(), {"usual": {}, "no-kl": NO_KL}, seeds=[0])
    FAILS["train"] = 1
    left = study.train().frame["left"]
    assert all(names(text, "train", "eval latest") for text in left)
    assert [process.command[0] for process in pretended].count("train") == 2
    assert names(caplog.text, "usual-0", "no-kl-0", "train", 1)


def test_nothing_is_written_through_a_link(tmp_path: Path, pretended: list[Pretended]) -> None:
    study = sweep(tmp_path / "kl", tiny(), {"usual": {}}, seeds=[0])
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "kl" / "usual-0.log").symlink_to(target)
    with pytest.raises(RunError, match=r"usual-0\.log"):
        study.train()
    assert target.read_text() == "mine" and not pretended


def test_an_interrupt_stops_what_trains_and_starts_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), threading.Event()

    class Endless(Pretended):
        def wait(self, timeout: float | None = None) -> int:
            began.set()
            ended.wait(20)
            return 130

        def send_signal(self, number: int) -> None:
            super().send_signal(number)
            ended.set()

    monkeypatch.setattr(subprocess, "Popen", Endless)
    STARTED.clear()
    trials = sweep(tmp_path / "kl", tiny(), {"usual": {}}, seeds=[0, 1]).trials

    def interrupt(futures: list[Any]) -> None:
        if futures:
            assert began.wait(20)
            raise KeyboardInterrupt

    monkeypatch.setattr(work, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        work.train(trials, 1, (), {trial.arm for trial in trials})
    assert [process.signals for process in STARTED] == [[signal.SIGINT]]


def test_each_process_sees_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    class Noting(Pretended):
        def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
            super().__init__(command)
            seen.append((command[3], env["CUDA_VISIBLE_DEVICES"]))

        def wait(self, timeout: float | None = None) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Noting)
    study = sweep(tmp_path / "kl", tiny(), {"usual": {}}, seeds=[0, 1, 2])
    study.train(gpus=[2, 5])
    assert {gpu for _, gpu in seen} <= {"2", "5"} and len(seen) >= 3
    assert work.places(2, [2, 5]) == ["2", "5", "2", "5"] and work.places(2, []) == [None, None]
    for jobs, gpus in ((0, ()), (1, (2, 2))):
        with pytest.raises(ConfigError):
            study.train(jobs, gpus)


@pytest.mark.parametrize(
    ("arms", "seeds"),
    [
        ({"a": {"batch.nothing": 1}}, [0]),
        ({"a": {"batch.group_size": 1}}, [0]),
        ({"../a": {}}, [0]),
        ({"a": {"run.seed": 4}}, [0]),
        ({"a": {}}, [1, 1]),
        ({"a": {}}, []),
        ({"a": {}}, [-1]),
        ({"a": Arm(changes={"sft.steps": 0}, grpo=False)}, [0]),
    ],
)
def test_a_study_that_cannot_be_is_refused_before_anything_is_written(
    arms: dict[str, Any], seeds: list[int], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError):
        sweep(tmp_path / "kl", tiny(), arms, seeds)
    assert not (tmp_path / "kl").exists()


def test_one_seed_is_no_list_of_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(tmp_path / "kl"), "--arm", "a=", "--seed", "4"]) == 2
    assert names(capsys.readouterr().err, "--seed", 4, "--seeds") and not (tmp_path / "kl").exists()


def test_a_folder_holds_one_study(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        sweep(tmp_path / "kl")
    made = sweep(tmp_path / "kl", tiny(), {"a": {}})
    assert sweep(tmp_path / "kl", tiny(), {"a": {}}).trials == Study.open(tmp_path / "kl").trials == made.trials
    for arms, seeds in (({"b": {}}, [0, 1, 2]), ({"a": {}}, [0]), ({"a": NO_KL}, [0, 1, 2])):
        with pytest.raises(RunError):
            sweep(tmp_path / "kl", tiny(), arms, seeds)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"version": 2}', "[" * 100, '{"version": 1, "arms": {"a": {}}}'])
def test_a_file_that_is_no_study_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(RunError, match=r"sweep\.json"):
        Study.open(tmp_path)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"algorithm.combine": "pcgrad", "batch.group_size": 4, "sampling.temperature": 0.7, "run.steps": 9}, True),
        ({**NO_KL, "objectives.fairness.weight": 2.0}, True),
        ({"run.seed": 1}, False),
        ({"sft.learning_rate": 1e-4}, False),
        ({"model.dtype": "bfloat16"}, False),
        ({"sampling.max_prompt_length": 64}, False),
        ({"batch.passes": "model"}, False),
    ],
)
def test_which_settings_sft_hangs_on(changes: dict[str, Any], same: bool) -> None:
    assert same_sft(tiny(), tiny().replace(**changes)) is same


def test_data_of_an_objective_matters_where_sft_has_none_of_its_own() -> None:
    gold = tiny().replace(**{"sft.data": None})
    other = {"objectives.fairness.data": "elsewhere"}
    assert same_sft(tiny(), tiny().replace(**other)) and not same_sft(gold, gold.replace(**other))


def test_means_and_paired_changes_over_seeds(tmp_path: Path) -> None:
    study = sweep(tmp_path / "kl", tiny(), {"usual": {}, "no-kl": NO_KL}, seeds=[0, 1, 2])
    for trial in study.trials:
        value = {"usual": 0.5, "no-kl": 0.7}[trial.arm] + 0.1 * trial.seed
        trial.made().log_evaluation(evaluated("latest", "fairness", value))
    usual, other = study.results().to_dict("records")
    assert (usual["arm"], usual["seeds"], round(usual["value"], 6)) == ("usual", 3, 0.6)
    assert round(usual["high"] - usual["value"], 4) == round(4.3027 * 0.1 / 3**0.5, 4)
    assert round(other["difference"], 6) == 0.2 and other["differs"] is True and other["difference_low"] > 0
    assert usual["differs"] is None
