"""Live settings: bounds, modes, who turned what, two writers at once, files broken by hand."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_nb import presets
from grpo_nb.config import Config, ConfigError, ObjectiveConfig
from grpo_nb.config.setting_keys import settings
from grpo_nb.run import knobs as module
from grpo_nb.run.knob_file import MOST_TURNS, KnobSnapshot
from grpo_nb.run.knobs import Knobs, check_start
from grpo_nb.storage import documents, files
from grpo_nb.storage.files import RunError
from grpo_nb.storage.lock import exclusive
from grpo_nb.storage.vocabulary import Command
from tests.support.kill_points import ROOT, survives
from tests.support.tokens import caused_by, names, pattern

CONFIG = presets.demo()
NO_BAND = CONFIG.replace(**{"objectives.fairness.kl_band": None})
FIXED = CONFIG.replace(**{"objectives.fairness.controller": "fixed"})
BETA = CONFIG.objectives["fairness"].beta


def make(folder: Path, config: Config = CONFIG) -> Knobs:
    folder.mkdir(parents=True, exist_ok=True)
    knobs = Knobs(folder / "knobs.json", config)
    knobs.create()
    return knobs


@pytest.fixture
def knobs(tmp_path: Path) -> Knobs:
    return make(tmp_path)


def edit(knobs: Knobs, change: Callable[[dict[str, Any]], Any]) -> None:
    """As a person with an editor does it: past all locks and checks."""
    tree = json.loads(knobs.path.read_text())
    change(tree)
    knobs.path.write_text(json.dumps(tree))


def turns(now: KnobSnapshot, before: KnobSnapshot) -> list[tuple[Any, ...]]:
    return [(t["key"], t["old"], t["new"], t["by"]) for t in now.changes_since(before)]


# ---- what there is at the start


def test_the_first_values_are_the_configuration(knobs: Knobs) -> None:
    assert list(knobs) == ["beta/fairness", "beta/hallucination", "temperature", "learning_rate"]
    first = knobs.snapshot()
    assert first.values == {
        "beta/fairness": BETA,
        "beta/hallucination": CONFIG.objectives["hallucination"].beta,
        "temperature": CONFIG.sampling.temperature,
        "learning_rate": CONFIG.algorithm.learning_rate,
    }
    assert (first.command, first.version, first.problem) == ("run", 0, None)


def test_a_beta_is_automatic_where_it_has_a_band(tmp_path: Path) -> None:
    assert make(tmp_path / "a").snapshot().modes == {
        "beta/fairness": "auto",
        "beta/hallucination": "auto",
        "temperature": "manual",
        "learning_rate": "manual",
    }
    without = make(tmp_path / "b", NO_BAND)
    assert without["beta/fairness"].mode == "manual" and without["beta/hallucination"].mode == "auto"


def test_a_configuration_that_starts_a_knob_out_of_bounds_is_a_wrong_setting() -> None:
    check_start(CONFIG)
    hot = CONFIG.replace(**{"sampling.temperature": 9.0})
    with pytest.raises(ConfigError, match=pattern("sampling.temperature", "temperature=9.0", 0.05, 5)):
        check_start(hot)


# ---- turning


def test_turning_a_knob_is_seen_by_any_other_reader(knobs: Knobs) -> None:
    reader = Knobs(knobs.path, CONFIG)
    before = reader.snapshot()
    knobs["beta/fairness"].set(0.1, by="dashboard")
    knobs["temperature"].set("0.7")
    now = reader.snapshot()
    assert now.values["beta/fairness"] == 0.1 and now.modes["beta/fairness"] == "manual"
    assert reader["temperature"].value == 0.7 and reader["beta/hallucination"].mode == "auto"
    assert now.version == 2
    assert turns(now, before) == [
        ("beta/fairness", "auto", 0.1, "dashboard"),
        ("temperature", CONFIG.sampling.temperature, 0.7, "user"),
    ]
    assert all(turn["at"] >= before.at[turn["key"]] for turn in now.changes_since(before))
    assert turns(now, now) == []


def test_back_to_automatic_and_again_by_hand(knobs: Knobs) -> None:
    start = knobs.snapshot()
    knobs["beta/fairness"].set(0.2)
    by_hand = knobs.snapshot()
    knobs["beta/fairness"].set_auto(by="dashboard")
    again = knobs.snapshot()
    assert again.modes["beta/fairness"] == "auto" and again.values["beta/fairness"] == 0.2
    assert turns(again, by_hand) == [("beta/fairness", 0.2, "auto", "dashboard")]
    assert turns(again, start) == [], "the same request as at the start"
    assert again.version == 2


# ---- undoing


def test_an_undo_is_a_request_that_goes_back_one_change_at_a_time(knobs: Knobs) -> None:
    start = knobs.snapshot()
    knobs["temperature"].set(0.7)
    knobs["beta/fairness"].set(0.2)
    knobs["beta/fairness"].set(0.3)
    before = knobs.snapshot()
    assert str(knobs.snapshot().last_turn) == "beta/fairness = 0.2"
    assert str(Knobs(knobs.path, CONFIG).undo(by="dashboard")) == "beta/fairness = 0.2", "from any process"
    now = knobs.snapshot()
    assert turns(now, before) == [("beta/fairness", 0.3, 0.2, "dashboard")]
    assert now.at["beta/fairness"] >= before.at["beta/fairness"] and now.version == before.version + 1
    assert str(knobs.undo()) == "beta/fairness = auto" and str(knobs.undo()) == "temperature = 1"
    assert turns(knobs.snapshot(), start) == [] and knobs.snapshot().last_turn is None
    with pytest.raises(RunError):
        knobs.undo()
    assert knobs.snapshot().version == 6


def test_an_undo_of_one_change_is_refused_once_it_is_not_the_newest(knobs: Knobs) -> None:
    knobs["temperature"].set(0.7)
    meant = knobs.snapshot().last_turn
    Knobs(knobs.path, CONFIG).undo()
    knobs["temperature"].set(0.7)  # the same change, made later
    with pytest.raises(RunError):
        knobs.undo(turn=meant)
    assert knobs["temperature"].value == 0.7
    knobs.undo(turn=knobs.snapshot().last_turn)
    assert knobs["temperature"].value == CONFIG.sampling.temperature


def test_what_changes_nothing_is_no_turn_and_old_ones_are_forgotten(knobs: Knobs) -> None:
    knobs["temperature"].set(CONFIG.sampling.temperature)
    assert knobs.snapshot().last_turn is None
    for n in range(MOST_TURNS + 3):
        knobs["temperature"].set(1 + (n + 1) / 100)
    for _ in range(MOST_TURNS):
        knobs.undo()
    assert knobs.snapshot().last_turn is None and knobs["temperature"].value == 1.03
    knobs["temperature"].set(0.5)
    knobs.reset()
    assert knobs.snapshot().last_turn is None


@pytest.mark.parametrize(
    "turn",
    [
        {"name": "beta/other", "value": 0.1, "mode": "manual"},
        {"name": "temperature", "value": 0.1, "mode": "auto"},
        {"name": "temperature", "value": 99.0, "mode": "manual"},
        {"name": "temperature", "value": "1", "mode": "manual"},
    ],
)
def test_a_turn_that_nobody_could_make_breaks_the_file(knobs: Knobs, turn: dict[str, Any]) -> None:
    knobs["temperature"].set(0.7)
    edit(knobs, lambda tree: tree.update(turns=[turn]))
    assert names(knobs.snapshot().problem or "", knobs.path.name) and knobs.snapshot().last_turn is None
    with pytest.raises(RunError):
        knobs.undo()


def test_a_file_of_earlier_versions_has_no_turns(knobs: Knobs) -> None:
    edit(knobs, lambda tree: tree.pop("turns"))
    assert knobs.snapshot().problem is None and knobs.snapshot().last_turn is None
    knobs["temperature"].set(0.7)
    edit(knobs, lambda tree: tree["turns"][0].pop("at"))  # written by the first version that had them
    knobs.undo(turn=knobs.snapshot().last_turn)
    assert knobs["temperature"].value == CONFIG.sampling.temperature


def test_a_knob_has_the_sentence_of_its_setting(knobs: Knobs) -> None:
    sentences = {setting.key: setting.meaning for setting in settings(CONFIG)}
    assert {name: knobs[name].meaning for name in knobs} == {
        "beta/fairness": sentences["objectives.fairness.beta"],
        "beta/hallucination": sentences["objectives.hallucination.beta"],
        "temperature": sentences["sampling.temperature"],
        "learning_rate": sentences["algorithm.learning_rate"],
    }


@pytest.mark.parametrize("config", [NO_BAND, FIXED], ids=["no band", "fixed"])
def test_only_a_beta_with_a_band_and_a_controller_can_be_automatic(tmp_path: Path, config: Config) -> None:
    knobs = make(tmp_path, config)
    assert knobs.snapshot().modes["beta/fairness"] == "manual"
    for name in ("beta/fairness", "temperature", "learning_rate"):
        with pytest.raises(RunError, match=pattern(f"'{name}'", "kl_band")):
            knobs[name].set_auto()
    assert knobs.snapshot().version == 0


def test_commands(knobs: Knobs) -> None:
    before = knobs.snapshot()
    knobs.request("pause", by="dashboard")
    assert knobs.command == "pause"
    assert turns(knobs.snapshot(), before) == [("command", "run", "pause", "dashboard")]
    knobs.request("stop")
    knobs.request("run")
    assert knobs.command == "run" and knobs.snapshot().version == 3
    with pytest.raises(RunError, match=pattern("'halt'", *Command)):
        knobs.request("halt")


def test_asking_for_what_is_there_changes_nothing(knobs: Knobs) -> None:
    knobs["beta/fairness"].set(0.2)
    stamp = knobs.path.stat()
    knobs["beta/fairness"].set(0.2, by="another")
    knobs["beta/hallucination"].set_auto()
    knobs.request("run")
    assert knobs.snapshot().version == 1 and knobs.path.stat().st_ino == stamp.st_ino


def test_a_snapshot_is_plain_json(knobs: Knobs) -> None:
    knobs["temperature"].set(0.9)
    knobs.request("step")
    snapshot = knobs.snapshot()
    state = documents.state({"knobs": json.loads(json.dumps(snapshot.to_dict()))})
    assert KnobSnapshot(**state["knobs"]) == snapshot and state["knobs"]["command"] is Command.PAUSE


# ---- refusals


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("beta/fairnes", ["'beta/fairness'"]),
        ("temprature", ["'temperature'"]),
        ("lr", ["beta/fairness", "beta/hallucination", "temperature", "learning_rate"]),
    ],
)
def test_an_unknown_knob_names_close_ones(knobs: Knobs, name: str, named: list[str]) -> None:
    with pytest.raises(RunError) as refusal:
        knobs[name]
    assert names(str(refusal.value), f"'{name}'", *named)
    assert [knob for knob in knobs if knob in str(refusal.value)] == [knob.strip("'") for knob in named], "no other"
    assert name not in knobs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 5.01),
        ("temperature", "hot"),
        ("temperature", True),
        ("beta/fairness", -0.001),
        ("beta/fairness", 10.5),
        ("beta/fairness", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", 1.5),
        ("learning_rate", 10**400),
        ("learning_rate", ""),
    ],
)
def test_out_of_bounds_is_refused_with_the_bounds(knobs: Knobs, name: str, value: float | str) -> None:
    before = knobs.path.read_bytes()
    low, high = knobs[name].bounds
    with pytest.raises(RunError) as refusal:
        knobs[name].set(value)
    assert names(str(refusal.value), f"{name}={value!r}", f"{low:g}", f"{high:g}")
    assert knobs.path.read_bytes() == before


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.05), ("temperature", 5), ("beta/fairness", 0)])
def test_the_ends_of_the_bounds_may_be_set(knobs: Knobs, name: str, value: float | int) -> None:
    knobs[name].set(value)
    assert knobs[name].value == value


def test_an_objective_may_have_any_name(tmp_path: Path) -> None:
    objectives = {"a/b": ObjectiveConfig(task="bbq"), "größe": ObjectiveConfig(task="bbq", kl_band=None)}
    knobs = make(tmp_path, Config(objectives=objectives))
    knobs["beta/a/b"].set(0.3)
    knobs["beta/größe"].set(0.4)
    knobs["beta/a/b"].set_auto()
    reread = Knobs(knobs.path, Config(objectives=objectives)).snapshot()
    assert reread.values["beta/größe"] == 0.4 and reread.modes["beta/a/b"] == "auto"


def test_a_read_only_folder_is_one_clear_error(knobs: Knobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files.os, "replace", read_only)
    with pytest.raises(RunError, match=pattern(knobs.path), check=caused_by(errno.EROFS)):
        knobs["temperature"].set(0.5)
    monkeypatch.undo()
    assert knobs["temperature"].value == CONFIG.sampling.temperature
    assert not list(knobs.path.parent.glob("*.tmp")) and not list(knobs.path.parent.glob(".*.tmp"))


# ---- broken by hand


BROKEN: dict[str, tuple[Callable[[Knobs], Any], str]] = {
    "cut": (lambda k: k.path.write_text(k.path.read_text()[:50]), "knobs.json"),
    "empty": (lambda k: k.path.write_text(""), "knobs.json"),
    "not utf-8": (lambda k: k.path.write_bytes(b"\xff\xfe\x00"), "knobs.json"),
    "a list": (lambda k: k.path.write_text("[]"), "knobs.json"),
    "missing": (lambda k: k.path.unlink(), "knobs.json"),
    "no such command": (lambda k: edit(k, lambda t: t["command"].update(value="hop")), "command.value"),
    "a text": (lambda k: edit(k, lambda t: t["knobs"]["temperature"].update(value="warm")), "knobs.temperature.value"),
    "a truth": (lambda k: edit(k, lambda t: t["knobs"]["temperature"].update(value=True)), "knobs.temperature.value"),
    "a quoted number": (
        lambda k: edit(k, lambda t: t["knobs"]["temperature"].update(value="1.0")),
        "knobs.temperature.value",
    ),
    "nan": (lambda k: edit(k, lambda t: t["knobs"]["temperature"].update(value=float("nan"))), "knobs.json"),
    "unknown key": (lambda k: edit(k, lambda t: t["knobs"]["temperature"].update(vlaue=1)), "knobs.temperature.vlaue"),
    "out of bounds": (
        lambda k: edit(k, lambda t: t["knobs"]["temperature"].update(value=50)),
        "temperature=50.0",
    ),
    "a knob less": (lambda k: edit(k, lambda t: t["knobs"].pop("beta/fairness")), "beta/fairness"),
    "a knob more": (
        lambda k: edit(k, lambda t: t["knobs"].update({"beta/fairnes": t["knobs"]["beta/fairness"]})),
        "'beta/fairnes'",
    ),
    "auto without controller": (
        lambda k: edit(k, lambda t: t["knobs"]["temperature"].update(mode="auto")),
        "'temperature'",
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_file_stops_writers_and_never_the_trainer(knobs: Knobs, damage: str) -> None:
    knobs["beta/fairness"].set(0.3)
    good = knobs.snapshot()
    break_it, reason = BROKEN[damage]
    break_it(knobs)
    broken = knobs.path.read_bytes() if knobs.path.exists() else None

    stand_in = knobs.snapshot()
    assert stand_in.problem is not None and str(knobs.path) in stand_in.problem and reason in stand_in.problem
    assert (stand_in.values, stand_in.modes, stand_in.version) == (good.values, good.modes, good.version)
    assert turns(stand_in, good) == []
    for turn in (lambda: knobs["temperature"].set(0.5), lambda: knobs.request("pause")):
        with pytest.raises(RunError, match=pattern("`run.knobs.reset()`")):
            turn()
    assert (knobs.path.read_bytes() if knobs.path.exists() else None) == broken, "what a person wrote is theirs"

    knobs.reset()
    after = knobs.snapshot()
    assert after.problem is None and after.version == good.version + 1 and after.modes["beta/fairness"] == "auto"
    knobs["temperature"].set(0.5)
    assert knobs["temperature"].value == 0.5


@pytest.mark.parametrize("damage", BROKEN)
def test_a_stop_gets_through_a_broken_file_which_is_kept_aside(
    knobs: Knobs, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    knobs["temperature"].set(0.7)
    knobs["temperature"].set(0.5)
    version = knobs.snapshot().version
    BROKEN[damage][0](knobs)
    broken = knobs.path.read_bytes() if knobs.path.exists() else None
    knobs.request("stop", by="me")
    now = Knobs(knobs.path, CONFIG).snapshot()
    assert (now.command, now.by["command"], now.values["temperature"]) == ("stop", "me", 0.5)
    assert now.problem is None and now.version > version
    assert [turn.value for turn in now.turns] == [CONFIG.sampling.temperature, 0.7], "an undo goes back to these"
    aside = knobs.path.with_name("knobs.broken.json")
    assert (aside.read_bytes() if aside.exists() else None) == broken
    assert names(caplog.text, knobs.path.name, *([aside.name] if broken is not None else []))


def test_a_trainer_that_starts_on_a_broken_file_uses_the_configuration(knobs: Knobs) -> None:
    knobs.path.write_text("{")
    first = Knobs(knobs.path, CONFIG).snapshot()
    assert first.problem and first.values["beta/fairness"] == BETA and first.command == "run"


def test_a_value_edited_by_hand_is_used_and_said_to_be(knobs: Knobs) -> None:
    knobs["temperature"].set(0.8, by="dashboard")
    before = knobs.snapshot()
    edit(knobs, lambda tree: tree["knobs"]["temperature"].update(value=0.6))
    ((*turn, by),) = turns(knobs.snapshot(), before)
    assert turn == ["temperature", 0.8, 0.6] and by != "dashboard" and names(by, "knobs.json")


def test_the_version_never_falls(knobs: Knobs) -> None:
    for value in (0.5, 0.6, 0.7):
        knobs["temperature"].set(value)
    edit(knobs, lambda tree: tree.update(version=0))
    assert knobs.snapshot().version == 3
    knobs["temperature"].set(0.8)
    assert knobs.snapshot().version == 4


# ---- many writers


WRITER = """
import sys
from pathlib import Path
from grpo_nb import presets
from grpo_nb.run.knobs import Knobs
knobs = Knobs(Path(sys.argv[1]), presets.demo())
for i in range(1, 41):
    knobs[sys.argv[2]].set(i / 100, by=sys.argv[2])
"""


def test_two_processes_turn_knobs_at_once_and_no_turn_is_lost(knobs: Knobs) -> None:
    names = ("beta/fairness", "beta/hallucination")
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(knobs.path), name], cwd=ROOT, stderr=subprocess.PIPE)
        for name in names
    ]
    version = 0
    while any(writer.poll() is None for writer in writers):
        snapshot = knobs.snapshot()
        assert snapshot.problem is None, "a reader met a half-written file"
        assert snapshot.version >= version
        version = snapshot.version
    assert [writer.communicate()[1] for writer in writers] == [b"", b""]
    final = knobs.snapshot()
    assert final.version == 80, "each of the 80 turns counted"
    assert [final.values[name] for name in names] == [0.4, 0.4]
    assert [final.by[name] for name in names] == list(names)


def test_a_writer_that_hangs_is_named_not_waited_for_forever(knobs: Knobs) -> None:
    code = (
        "import sys; from pathlib import Path; from grpo_nb.storage import lock\n"
        "with lock.exclusive(Path(sys.argv[1]), 0.2): pass"
    )
    command = [sys.executable, "-c", code, str(knobs.path)]
    with exclusive(knobs.path):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert names(done.stderr, "RunError", ".knobs.json.lock", "0.2 s")


def test_without_file_locks_turning_still_works(knobs: Knobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    knobs["temperature"].set(0.5)
    knobs["temperature"].set(0.6)
    assert knobs.snapshot().version == 2


def turn(folder: Path) -> None:
    Knobs(folder / "knobs.json", CONFIG)["temperature"].set(0.5)


def check_old_or_new(folder: Path) -> None:
    knobs = Knobs(folder / "knobs.json", CONFIG)
    now = knobs.snapshot()
    assert now.problem is None
    assert (now.values["temperature"], now.version) in ((CONFIG.sampling.temperature, 0), (0.5, 1))
    knobs["temperature"].set(0.9)
    assert knobs["temperature"].value == 0.9


def test_a_kill_at_any_call_leaves_the_old_values_or_the_new(tmp_path: Path) -> None:
    make(tmp_path / "run")
    assert survives(turn, check_old_or_new, tmp_path / "run") >= 3


def test_what_killed_writers_left_is_swept(knobs: Knobs) -> None:
    old, young = knobs.path.with_name(".knobs.json.1-aa.tmp"), knobs.path.with_name(".knobs.json.2-bb.tmp")
    for file in (old, young):
        file.write_text("{")
    os.utime(old, (1, 1))
    knobs["temperature"].set(0.5)
    assert not old.exists() and young.exists(), "a young one may be a living writer's"


def test_bounds_are_known_for_every_knob(knobs: Knobs) -> None:
    assert {name: module.bounds(name) for name in knobs} == {
        "beta/fairness": (0.0, 10.0),
        "beta/hallucination": (0.0, 10.0),
        "temperature": (0.05, 5.0),
        "learning_rate": (0.0, 1.0),
    }
    assert names(repr(knobs["temperature"]), "'temperature'", 1, "manual", 0.05, 5)


# ---- orders


def test_order_stands_until_it_is_done(knobs: Knobs) -> None:
    knobs.request("save", by="panel")
    asked = Knobs(knobs.path, CONFIG).snapshot()
    assert (asked.orders, asked.by["save"], asked.command) == (["save"], "panel", "run")
    knobs.request("save")  # given again while the first is carried out
    knobs.done(Command.SAVE, asked.at["save"])
    again = knobs.snapshot()
    assert again.orders == ["save"], "the second one is still to be done"
    knobs.done(Command.SAVE, again.at["save"])
    assert knobs.snapshot().orders == []


def test_one_step_is_a_pause_that_lets_one_through(knobs: Knobs) -> None:
    knobs.request("step")
    assert (knobs.command, knobs.snapshot().orders) == ("pause", ["step"])
    knobs.request("evaluate")
    knobs.request("run")
    assert knobs.snapshot().orders == ["evaluate"], "who lets it run wants no pause after a step"


def test_the_file_holds_the_words(knobs: Knobs) -> None:
    knobs.request("step")
    content = json.loads(knobs.path.read_text())
    assert content["command"]["value"] == "pause" and list(content["orders"]) == ["step"]
    now = Knobs(knobs.path, CONFIG).snapshot()
    assert now.command is Command.PAUSE and now.orders == [Command.STEP]


@pytest.mark.parametrize(
    "change",
    [
        {"command": {"value": "save", "by": "me", "at": 1.0}},
        {"command": {"value": "halt", "by": "me", "at": 1.0}},
        {"orders": {"pause": {"by": "me", "at": 1.0}}},
        {"orders": {"dance": {"by": "me", "at": 1.0}}},
    ],
    ids=["once", "unknown", "held", "unknown once"],
)
def test_a_command_stands_where_its_kind_does(knobs: Knobs, change: dict[str, Any]) -> None:
    knobs.path.write_text(json.dumps(json.loads(knobs.path.read_text()) | change))
    now = knobs.snapshot()
    assert now.problem and names(now.problem, "knobs.json", *change) and (now.command, now.orders) == ("run", [])


def test_knobs_written_before_there_were_orders_are_read(knobs: Knobs) -> None:
    content = json.loads(knobs.path.read_text())
    del content["orders"]
    knobs.path.write_text(json.dumps(content))
    assert knobs.snapshot().problem is None


def test_a_beta_starts_within_the_bounds_of_its_controller() -> None:
    config = presets.demo().replace(**{"objectives.fairness.beta": 2.0})
    with pytest.raises(ConfigError, match=pattern("objectives.fairness.beta=2", "beta_bounds", 0.0001, 1)):
        check_start(config)
    check_start(config.replace(**{"objectives.fairness.kl_band": None}))
    check_start(config.replace(**{"objectives.fairness.beta": 0.0}))
    with pytest.raises(ConfigError, match=pattern("objectives.fairness.beta_bounds=", 10)):
        check_start(config.replace(**{"objectives.fairness.beta_bounds": [1.0, 30.0]}))


def test_what_is_written_can_be_read_whatever_the_version_and_the_name(knobs: Knobs) -> None:
    edit(knobs, lambda tree: tree.update(version=2**53 - 1))
    knobs["temperature"].set(0.9, by="x" * 501)
    knobs.request("stop", by="x" * 501)
    now = Knobs(knobs.path, CONFIG).snapshot()
    assert (now.problem, now.command, now.values["temperature"]) == (None, Command.STOP, 0.9)


def test_a_value_that_a_controller_would_overrule_is_refused_aloud(knobs: Knobs) -> None:
    content = json.loads(knobs.path.read_text())
    content["knobs"]["beta/fairness"]["value"] = 0.5
    knobs.path.write_text(json.dumps(content))
    edited = knobs.snapshot()
    assert edited.problem and names(edited.problem, "beta/fairness", "0.5", '"mode": "manual"')
    assert edited.values["beta/fairness"] == BETA
    content["knobs"]["beta/fairness"]["mode"] = "manual"
    knobs.path.write_text(json.dumps(content))
    taken = knobs.snapshot()
    assert taken.problem is None and (taken.values["beta/fairness"], taken.modes["beta/fairness"]) == (0.5, "manual")
    knobs["beta/fairness"].set_auto()
    assert knobs.snapshot().modes["beta/fairness"] == "auto", "its value stays, and is no edit"
