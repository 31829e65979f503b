"""Pictures show what the rows say, from nothing to thousands of steps, without pyplot, mathtext or overlaps."""

import functools
import io
import math
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

import matplotlib.mathtext
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from grpo_nb import plots, presets
from grpo_nb.config import Config
from grpo_nb.plots import canvas, thinning
from tests.support.made_rows import ill

CONFIG = presets.demo().replace(
    **{"run.steps": 60, "objectives.fairness.kl_band": (0.01, 0.1), "objectives.hallucination.kl_band": (0.01, 0.1)}
)
F, H = "fairness", "hallucination"
EVENTS = pd.DataFrame(
    [
        {"kind": "start", "step": 0, "time": 1.0},
        {"kind": "resume", "step": 20},
        {"kind": "knob", "step": 30, "key": f"beta/{H}", "old": "auto", "new": 0.08, "by": "user"},
        {"kind": "checkpoint", "step": 40},
    ]
)


def frame(steps: int = 47, change: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: {}) -> pd.DataFrame:
    return pd.DataFrame(ill(change, steps))


def sick(row: dict[str, Any]) -> dict[str, Any]:
    exploded = {"grad/norm": 1.1e8, "status": "skipped"} if row["step"] == 40 else {}
    lost = {"grad/norm": math.nan, "loss": math.nan, "status": "skipped"} if row["step"] == 22 else {}
    beta = {f"beta/{F}": min(1.0, 0.04 * 1.15 ** (row["step"] // 3)), f"kl/{F}": 0.01 * 1.08 ** row["step"]}
    return beta | {f"truncation/{F}": min(1.0, row["step"] / 60)} | exploded | lost


def compared() -> pd.DataFrame:
    metrics = {
        F: ["accuracy", "accuracy_disambiguated", "bias_ambiguous"],
        H: ["accuracy_unanswerable", "unparsed_rate"],
    }
    rows = []
    for name, names in metrics.items():
        for i, metric in enumerate(names):
            row: dict[str, Any] = {"objective": name, "metric": metric, "differs": i == 0, "n": 200, "clusters": 40}
            for stage, value in (("base", math.nan), ("sft", 0.4), ("latest", 0.9), ("difference", 0.5)):
                row |= {stage: value, f"{stage}_low": value - 0.1, f"{stage}_high": value + 0.05}
            rows.append(row)
    return pd.DataFrame(rows)


ALONE = CONFIG.replace(objectives={F: CONFIG.objectives[F].model_dump()})


def reported() -> pd.DataFrame:
    """Rows with the parts of the reward, phases of the time, and every fifth step the gradient report."""

    def more(row: dict[str, Any]) -> dict[str, Any]:
        seconds = {"score": 0.00047, "reference": 0.1, "train": 0.25, "judge": 12.5, "evaluate": 3.25}
        phases = {f"time/{phase}": share for phase, share in seconds.items()}
        parts = {f"reward/{o}/part/brevity": 0.1 * i - 0.1 for i, o in enumerate((F, H))}
        spread = {f"reward/{o}/part_std/{part}": 0.2 for o in (F, H) for part in ("task", "brevity")}
        return phases | parts | spread | (report() if row["step"] % 5 == 0 else {})

    def report() -> dict[str, Any]:
        terms = {f"grad/norm/{o}/{term}": norm for o in (F, H) for term, norm in (("policy", 0.29), ("kl", 0.002))}
        return terms | {f"grad/cosine/{F}/{H}": -0.3}

    return frame(47, more)


def stages(across: list[float], up: list[float], front: str, knee: int, *more: str) -> pd.DataFrame:
    """A Pareto frame; `front` has a + for every stage that is on it."""
    rows = [
        {"stage": f"step {20 * i}", "step": 20 * i, "front": front[i] == "+", "knee": i == knee} for i in range(len(up))
    ]
    table = pd.DataFrame(rows)
    for name, values in ((f"{F}/accuracy_ambiguous", across), (f"{H}/accuracy", up), *((m, up[::-1]) for m in more)):
        for part, by in (("", 0.0), ("_low", -0.1), ("_high", 0.05)):
            table[name + part] = [value + by for value in values]
    return table


def dashboard(rows: pd.DataFrame, config: Config = CONFIG, **more: Any) -> plots.Picture:
    return plots.dashboard(rows, config, EVENTS, name="demo-run", updated=datetime(2026, 1, 2, 12, 31, 7), **more)


FRONT = stages([0.2, 0.5, 0.8, 0.9, 0.85], [0.6, 0.7, 0.9, 0.75, 0.5], "--++-", 2)
PICTURES: dict[str, Callable[[], Figure]] = {
    "healthy": lambda: dashboard(frame()),
    "sick": lambda: dashboard(frame(70, sick)),
    "empty": lambda: plots.dashboard(pd.DataFrame(), CONFIG, pd.DataFrame()),
    "first step": lambda: plots.dashboard(frame(1), CONFIG),
    "few steps": lambda: plots.dashboard(frame(4), CONFIG),
    "rewards page": lambda: plots.rewards(reported(), CONFIG, EVENTS, name="demo-run"),
    "rewards page, one objective": lambda: plots.rewards(reported(), ALONE, EVENTS, name="demo-run"),
    "rewards page, first step": lambda: plots.rewards(reported().head(1), CONFIG),
    "rewards page, empty": lambda: plots.rewards(pd.DataFrame(), CONFIG),
    "machinery": lambda: plots.machinery(reported(), CONFIG, EVENTS, name="demo-run"),
    "machinery, without a report": lambda: plots.machinery(frame(), CONFIG),
    "machinery, first step": lambda: plots.machinery(reported().head(1), CONFIG),
    "machinery, empty": lambda: plots.machinery(pd.DataFrame(), CONFIG),
    "reward curves": lambda: plots.reward_curves(frame(), CONFIG),
    "reward curves, empty": lambda: plots.reward_curves(pd.DataFrame(), CONFIG),
    "answers": lambda: plots.answers(frame(), CONFIG),
    "answers, empty": lambda: plots.answers(pd.DataFrame(), CONFIG),
    "sft": lambda: plots.sft(frame()),
    "sft, empty": lambda: plots.sft(pd.DataFrame()),
    "before and after": lambda: plots.before_after(compared()),
    "before and after, empty": lambda: plots.before_after(compared().head(0)),
    "front": lambda: plots.pareto(FRONT),
    "front, three objectives": lambda: plots.pareto(stages([0.2, 0.6, 0.9], [0.9, 0.8, 0.3], "+++", 1, "style/reward")),
    "front, one objective": lambda: plots.pareto(FRONT.drop(columns=[c for c in FRONT if c.startswith(H)])),
    "front, all alike": lambda: plots.pareto(stages([0.5] * 4, [0.5] * 4, "++++", 0)),
    "front, empty": lambda: plots.pareto(FRONT.head(0)),
}
each_picture = pytest.mark.parametrize("name", PICTURES)


def panel(figure: Figure, title: str) -> Axes:
    return next(a for a in figure.axes if a.get_title(loc="left").startswith(title))


def texts(figure: Figure) -> list[Text]:
    """All that can be read; ticks beyond the end of their axis exist, but are not drawn."""
    beyond = {id(label) for axis in figure.axes for label in _labels_beyond(axis)}
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in beyond]


def _labels_beyond(axis: Axes) -> list[Text]:
    sides = ((axis.xaxis, sorted(axis.get_xlim())), (axis.yaxis, sorted(axis.get_ylim())))
    ticks = [(tick, low, high) for side, (low, high) in sides for tick in side.get_major_ticks()]
    return [tick.label1 for tick, low, high in ticks if not low <= tick.get_loc() <= high]


def curve(axis: Axes, colour: str) -> Any:
    """The bold line of a colour."""
    return next(line for line in axis.lines if line.get_color() == colour and line.get_linewidth() == 2)


# All pictures


class Drawn(NamedTuple):
    figure: Figure
    png: bytes
    boxes: list[tuple[str, Bbox]]
    """Each text and its place in pixels."""
    parsed: list[str]
    """What was parsed as mathtext on the way."""


@functools.cache
def drawn(name: str) -> Drawn:
    """A picture, drawn once for all tests."""
    parsed, parse = [], matplotlib.mathtext.MathTextParser.parse

    def noted(parser: Any, text: str, *more: Any, **options: Any) -> Any:
        parsed.append(text)
        return parse(parser, text, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.mathtext.MathTextParser, "parse", noted)
        figure = PICTURES[name]()
        png = plots.to_png(figure)
    renderer = FigureCanvasAgg(figure).get_renderer()
    return Drawn(figure, png, [(t.get_text(), t.get_window_extent(renderer)) for t in texts(figure)], parsed)


@each_picture
def test_every_picture_is_a_png_of_its_size(name: str) -> None:
    figure, png, _, _ = drawn(name)
    width, height = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG") and (width, height) == pytest.approx(figure.get_size_inches() * 100, abs=1)
    assert len(png) < 250_000


def test_a_notebook_shows_the_picture_that_is_written() -> None:
    figure, png, _, _ = drawn(next(iter(PICTURES)))
    shown, about = figure._repr_png_()  # type: ignore[attr-defined]
    assert shown == png and "Reward" in about["alt"]


KEPT_BYTES = 50_000


@pytest.mark.ux(34, at="unit")
@each_picture
def test_what_a_notebook_keeps_of_a_picture_is_small(name: str) -> None:
    figure = drawn(name).figure
    kept = plots.to_kept_png(figure)
    width, height = struct.unpack(">II", kept[16:24])
    assert (width, height) == pytest.approx(figure.get_size_inches() * 72, abs=1)
    assert len(kept) * 4 / 3 < KEPT_BYTES and figure.dpi == 100, "as base64; and the picture is as it was"


def test_colours_of_the_palette_stay_apart_in_few_colours() -> None:
    shades = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)  # more than can be kept
    own = [tuple(bytes.fromhex(colour[1:])) for colour in canvas.OWN]
    shades[0, : len(own)] = own
    kept = canvas.in_few_colours(Image.fromarray(shades))
    assert [tuple(pixel) for pixel in np.asarray(kept.convert("RGB"))[0, : len(own)].tolist()] == own
    assert len(np.unique(kept)) <= canvas.KEPT_COLOURS + len(own)


def test_a_kept_dashboard_has_the_colours_of_its_objectives() -> None:
    kept = Image.open(io.BytesIO(plots.to_kept_png(dashboard(frame())))).convert("RGB")
    seen = {colour for _, colour in kept.getcolors(2**16) or []}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in canvas.PALETTE[:2]} <= seen


@pytest.mark.ux(34, at="unit")
def test_a_thousand_steps_fit_into_a_notebook() -> None:
    assert len(plots.to_kept_png(dashboard(frame(1000)))) * 4 / 3 < KEPT_BYTES


def test_the_total_of_the_header_is_never_below_the_step() -> None:
    def header(events: pd.DataFrame | None) -> str:
        texts = [t.get_text() for t in plots.dashboard(frame(8), short, events).texts]
        return next(text for text in texts if text.startswith("step "))

    short = CONFIG.replace(**{"run.steps": 4})
    assert header(None) == "step 8 of 8"
    asked = [{"kind": "start", "step": 0, "goal": 4}, {"kind": "resume", "step": 4, "goal": 12}, {"kind": "paused"}]
    assert header(pd.DataFrame(asked)) == "step 8 of 12"
    assert header(pd.DataFrame(asked[:1])) == "step 8 of 8"


def test_gradients_that_are_all_zero_are_drawn() -> None:
    """As of a model that was never warmed up: every group is dead."""
    plots.to_png(dashboard(frame(5, lambda row: {"grad/norm": 0.0, "status": "ok"})))


@each_picture
def test_no_text_overlaps_another_or_leaves_the_picture(name: str) -> None:
    figure, _, boxes, _ = drawn(name)
    width, height = figure.get_size_inches() * figure.dpi
    outside = [text for text, b in boxes if b.x0 < 0 or b.y0 < 0 or b.x1 > width or b.y1 > height]
    assert not outside
    clashes = [(one, other) for i, (one, a) in enumerate(boxes) for other, b in boxes[:i] if _overlap(a, b) > 1.5]
    assert not clashes


def _overlap(a: Any, b: Any) -> float:
    """Pixels by which two boxes overlap in the direction in which they do least."""
    return min(min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0))


@each_picture
def test_nothing_is_set_as_mathtext(name: str) -> None:
    figure, _, _, parsed = drawn(name)
    assert not parsed
    assert not [t.get_text() for t in texts(figure) if "$" in t.get_text()]  # what would be, and is shown raw now


def test_a_name_with_dollars_is_a_name() -> None:
    config = CONFIG.replace(objectives={"a$b$": {"task": "bbq", "data": "demo"}})
    plots.to_png(plots.dashboard(pd.DataFrame(), config, None, name="$x^$ run"))


@pytest.mark.ux(16, at="unit")
def test_threads_may_draw_at_once() -> None:
    failures: list[BaseException] = []

    def draw() -> None:
        try:
            for _ in range(1):
                plots.to_png(dashboard(frame(70, sick)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_pyplot_is_never_imported() -> None:
    code = (
        "import sys, pandas as pd; from grpo_nb import plots, presets; "
        "plots.to_png(plots.dashboard(pd.DataFrame(), presets.demo())); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What the dashboard says


def test_the_header_says_run_step_time_and_newest_reward() -> None:
    said = [t.get_text() for t in texts(dashboard(frame()))]
    assert "demo-run" in said and "step 47 of 60   last update 12:31:07" in said
    assert [s for s in said if s.startswith(f"{F}   reward 0.8")]


def test_objectives_keep_their_colours_in_the_order_of_the_config() -> None:
    assert plots.colours([F, H]) == {F: canvas.PALETTE[0], H: canvas.PALETTE[1]}
    assert len(set(canvas.PALETTE)) == 8
    figure = dashboard(frame(10)[[c for c in frame(1).columns if F not in c]])  # the first objective has no data
    axis = panel(figure, "KL")
    assert curve(axis, canvas.PALETTE[1]).get_ydata()[-1] == pytest.approx(frame(10)[f"kl/{H}"].iloc[-1])


def test_kl_is_drawn_over_its_band() -> None:
    axis = panel(dashboard(frame(20)), "KL")
    assert {0.01, 0.1} <= {line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == "--"}
    own = CONFIG.replace(**{f"objectives.{H}.kl_band": [0.2, 0.4]})
    assert len(panel(dashboard(frame(20), own), "KL").patches) == 2
    none = CONFIG.replace(**{f"objectives.{o}.kl_band": None for o in (F, H)})
    assert not panel(dashboard(frame(20), none), "KL").patches


@pytest.mark.ux(3, at="unit")
def test_beta_goes_in_steps_with_a_mark_where_a_person_turned_it() -> None:
    rows = frame(47, lambda row: {f"beta/{H}": 0.08, f"beta_mode/{H}": "manual"} if row["step"] >= 30 else {})
    for events in (EVENTS, None):
        axis = panel(plots.dashboard(rows, CONFIG, events), "β")
        assert {line.get_drawstyle() for line in axis.lines if line.get_linewidth() == 2} == {"steps-post"}
        (marks,) = [line for line in axis.lines if line.get_marker() == "v" and len(line.get_xdata())]
        assert (list(marks.get_xdata()), list(marks.get_ydata())) == ([30], [0.08])


def test_beta_over_decades_gets_a_log_axis() -> None:
    assert panel(dashboard(frame(70, sick)), "β").get_yscale() == "log"
    assert panel(dashboard(frame(47)), "β").get_yscale() == "linear"


def test_length_is_drawn_against_the_cap() -> None:
    axis = panel(dashboard(frame(20)), "Completion length")
    cap = CONFIG.sampling.max_completion_length
    assert f"cap {cap}" in [t.get_text() for t in axis.texts] and axis.get_ylim()[1] > cap


def test_no_words_stand_where_the_gradient_norm_runs() -> None:
    axis = panel(figure := dashboard(frame()), "Gradient norm")
    figure.canvas.draw()
    top = axis.get_window_extent().y1
    inside = [t.get_text() for t in axis.texts if t.get_text() and t.get_window_extent().y0 < top]
    assert inside == [] and any("limit 1 dotted" in t.get_text() for t in axis.texts)


def test_skipped_steps_are_crosses_and_clipped_ones_ticks() -> None:
    axis = panel(dashboard(frame(70, sick)), "Gradient")
    crosses = [x for line in axis.lines if line.get_marker() == "x" for x in line.get_xdata()]
    ticks = [x for line in axis.lines if line.get_marker() == "|" for x in line.get_xdata()]
    assert sorted(crosses) == [22, 40] and sorted(ticks) == [17, 34, 51, 68]
    assert axis.get_ylim()[1] < 10  # the skipped 1.1e8 does not flatten the rest


@pytest.mark.parametrize("norms", [[0.0], [0.0, 0.0, 0.4], [None], [0.0, None]])
def test_a_run_that_learns_nothing_is_drawn_all_the_same(norms: list[float | None]) -> None:
    quiet = frame(12, lambda row: {"grad/norm": norms[row["step"] % len(norms)], "grad/update": 0.0})
    for draw in (plots.dashboard, plots.machinery, plots.rewards):
        draw(quiet, CONFIG).canvas.draw()


def test_gradients_over_decades_get_a_log_axis() -> None:
    axis = panel(dashboard(frame(47, lambda row: {"grad/norm": 10.0 ** (row["step"] % 5)})), "Gradient")
    assert axis.get_yscale() == "log"


@pytest.mark.ux(20, at="unit")
def test_a_resume_is_marked_in_every_panel() -> None:
    figure = dashboard(frame())
    for axis in figure.axes:
        assert [20.5, 20.5] in [list(line.get_xdata()) for line in axis.lines]
    assert "resumed here" in [t.get_text() for t in texts(figure)]


def test_an_empty_run_says_so_and_shows_its_targets() -> None:
    figure = PICTURES["empty"]()
    words = [t.get_text() for t in texts(figure)]
    assert max(words.count(word) for word in words if " " in word) == 6, "in each panel"
    assert panel(figure, "KL").patches and "step 0 of 60" in [t.get_text() for t in texts(figure)]


# The other pages


def test_each_reward_function_is_drawn_with_its_spread() -> None:
    axis = panel(plots.rewards(reported(), CONFIG), f"Reward functions, {F}")
    assert [t.get_text() for t in axis.get_legend().get_texts()] == ["task", "brevity"]
    bands = [c.get_paths()[0].get_extents() for c in axis.collections]
    assert [round(b.height, 1) for b in bands][1] == 0.4 and len(bands) == 2


def test_terms_and_cosine_of_the_gradient_report_are_drawn() -> None:
    figure = plots.machinery(reported(), CONFIG)
    axis = panel(figure, "Gradient by objective")
    drawn = [line for line in axis.lines if len(line.get_xdata())]
    assert len(drawn) == 6 and axis.get_yscale() == "log"
    assert sorted({len(line.get_xdata()) for line in drawn}) == [9, 47]
    (cosine,) = [line for line in panel(figure, "Agreement").lines if line.get_linewidth() == 2]
    assert list(cosine.get_xdata()) == list(range(5, 48, 5)) and set(cosine.get_ydata()) == {-0.3}


def test_what_was_not_logged_says_what_to_set() -> None:
    rows = frame()[[key for key in frame().columns if not key.startswith("grad/")]]
    said = [t.get_text() for t in texts(plots.machinery(rows, CONFIG))]
    assert any("algorithm.gradient_report_every" in text for text in said)


def test_time_is_told_by_phase() -> None:
    judged = reported().assign(**{f"time/{part}/{F}": 9.0 for part in ("judge", "judge_p50", "judge_p95")})
    axis = panel(plots.machinery(judged, CONFIG), "Time of a step")
    named = [t.get_text() for t in axis.get_legend().get_texts()]
    assert named == ["rollout 0.50", "score 0.00", "reference 0.10", "train 0.25", "judge 12.50", "evaluate 3.25"]


@pytest.mark.ux(16, at="unit")
def test_all_pages_have_one_size() -> None:
    drawn = (plots.dashboard, plots.rewards, plots.machinery)
    assert (
        len({tuple(draw(rows, CONFIG).get_size_inches()) for draw in drawn for rows in (frame(9), pd.DataFrame())}) == 1
    )


# Lines


def test_a_long_line_is_smoothed_over_its_faint_raw_values() -> None:
    axis = panel(dashboard(frame(47)), "Reward")
    widths = sorted(line.get_linewidth() for line in axis.lines if line.get_color() == canvas.PALETTE[0])
    assert widths.count(2) == 1 and widths.count(0.8) == 3
    raw, bold = frame(47)[f"reward/{F}/mean"], curve(axis, canvas.PALETTE[0]).get_ydata()
    assert np.diff(bold).std() < 0.5 * np.diff(raw).std()
    short = panel(dashboard(frame(10)), "Reward")
    assert list(curve(short, canvas.PALETTE[0]).get_ydata()) == pytest.approx(list(frame(10)[f"reward/{F}/mean"]))


def test_thousands_of_steps_are_thinned_but_keep_the_newest_and_the_skipped() -> None:
    rows = pd.DataFrame({"step": range(1, 9002), "status": "ok", "grad/norm": 0.5})
    rows.loc[4321, "status"] = "skipped"
    kept = thinning.ordered(rows)
    assert len(kept) < 2 * thinning.MOST_POINTS and {1, 4322, 9001} <= set(kept["step"])


def test_rows_out_of_order_and_twice_are_put_right() -> None:
    rows = pd.DataFrame({"step": [3, 1, 2, 2], "loss": [3.0, 1.0, 9.0, 2.0]})
    assert list(thinning.ordered(rows)["loss"]) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("last", "total", "end"), [(0, 60, 10), (8, 60, 10), (47, 60, 50), (60, 60, 60), (70, 60, 70)])
def test_the_step_axis_grows_in_strides_up_to_the_total(last: int, total: int, end: int) -> None:
    axis = canvas.new(2, 2).subplots()
    canvas.step_axis(axis, pd.DataFrame({"step": range(1, last + 1)}), total)
    assert axis.get_xlim() == (0, end)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04, "0.04"), (1e-4, "0.0001"), (1.0, "1"), (123456.0, "123,456"), (1e8, "1e+08"), (-0.5, "-0.5")],
)
def test_numbers_are_plain(value: float, text: str) -> None:
    assert canvas.plain(value) == text


def test_the_change_is_bold_where_it_is_sure() -> None:
    figure = plots.before_after(compared())
    weights = {t.get_text(): t.get_weight() for t in figure.axes[0].texts if "[" in t.get_text()}
    assert weights == {"+0.50  [+0.40, +0.55]": "normal"} or set(weights.values()) == {"bold", "normal"}
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [
        "accuracy",
        "accuracy, disambiguated",
        "bias, ambiguous",
    ]


def test_labels_at_the_end_of_the_curves_keep_apart_and_in_order() -> None:
    same = {f"reward/{F}/mean": 0.8, f"reward/{H}/mean": 0.801}
    figure = plots.reward_curves(frame(40, lambda row: same), CONFIG)
    heights = {t.get_text().split("\n")[0]: t.get_position()[1] for t in figure.axes[0].texts if "\n" in t.get_text()}
    assert heights[H] - heights[F] >= 0.14 - 1e-9


def test_the_front_is_filled_the_dominated_open_and_the_knee_ringed() -> None:
    (axis,) = plots.pareto(FRONT).axes
    points = {len(line.get_xdata()): line for line in axis.lines if line.get_markersize() == 7}
    assert points[2].get_markerfacecolor() != points[3].get_markerfacecolor() == canvas.PAPER
    (ring,) = [line for line in axis.lines if line.get_markersize() == 13]
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([0.8], [0.9])
    assert {t.get_text() for t in axis.texts} >= {"step 40, knee", "step 60", "step 0"}
    assert (axis.get_xlabel(), axis.get_ylabel()) == (f"{F}: accuracy ambiguous", f"{H}: accuracy")


def test_every_two_objectives_get_a_panel() -> None:
    assert len(PICTURES["front, three objectives"]().axes) == 3
    (axis,) = PICTURES["front, one objective"]().axes
    assert axis.get_xlabel() == "step" and len(PICTURES["front, empty"]().texts) == 1


def test_a_label_that_did_not_occur_is_0_in_a_point_of_many_rows() -> None:
    """One row in ten has an answer of a second label: of a long run, the shares of each point still add up to 1."""
    correct, unparsed = "label/fairness/correct", "label/fairness/unparsed"
    rows = [{"step": n, correct: 0.5, unparsed: 0.5} if n % 10 == 0 else {"step": n, correct: 1.0} for n in range(9000)]
    drawn = thinning.ordered(pd.DataFrame(rows))
    assert len(drawn) < 9000 and (drawn[correct] + drawn[unparsed]).to_numpy() == pytest.approx(np.ones(len(drawn)))
