"""How often the curves are drawn, and what that costs a step, together: `python -m tests.support.live_rate`.

JupyterLab in Chromium on this machine, the demo's model, twin runs as in `grpo_nb.dev.live_bench`: one is watched in
the browser, the other is not. Steps gate nothing here: the figures are read by a person.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_nb import presets
from grpo_nb.dev import live_bench
from grpo_nb.run.run import Run
from tests.support.lab import Desk, Lab, chromium, until

CELLS = (
    "import json\nimport grpo_nb as g\nfrom grpo_nb.dev import live_bench",
    "session = g.start('steps')\ng.attach('steps').dashboard().close()\nawait session.wait(step=2)",
    "print('found', json.dumps(await live_bench.alternate(session, g.start('twin'), {pairs}, {block})))",
    "session.stop()\ng.attach('twin').stop()",
)
WATCH = """() => {
    window.drawn = [];
    const seen = new Map();
    setInterval(() => document.querySelectorAll('.gnb-live, .grpo-nb img').forEach((view) => {
        const what = view.dataset.drawn ?? view.src;
        if (seen.get(view) !== what) {
            seen.set(view, what);
            window.drawn.push([[...seen.keys()].indexOf(view), performance.now() / 1000]);
        }
    }), 50);
}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6, help="blocks of steps, each watched and not")
    parser.add_argument("--block", type=int, default=40, help="steps of a block")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="grpo_nb-") as folder:
        lab = Lab(Path(folder))
        try:
            with chromium() as browser:
                for line in measured(Desk(lab, browser.new_page()), options.pairs, options.block):
                    sys.stdout.write(f"{line}\n")
        finally:
            lab.end_kernels()
            lab.close()
    return 0


def measured(desk: Desk, pairs: int, block: int) -> list[str]:
    """The cost of a step and the time between two drawings."""
    steps = (pairs + 2) * (block + live_bench.LEFT_OUT)
    config = presets.demo().replace(
        **{"sft.steps": 0, "run.steps": steps, "run.checkpoint_every": steps, "run.quick_eval_every": 0}
    )
    for name in ("steps", "twin"):
        Run.create(desk.lab.notebooks / name, config)
    desk.open(desk.lab.write("rate.ipynb", *(cell.format(pairs=pairs, block=block) for cell in CELLS)))
    desk.page.evaluate(WATCH)
    desk.run_all()
    until(lambda: "found" in desk.output(2) or desk.errors(), "the blocks", patience=3000)
    assert not desk.errors(), desk.errors()
    times = json.loads(desk.output(2).partition("found ")[2].splitlines()[0])
    return [live_bench.compared(times), _gaps(desk.page.evaluate("window.drawn"))]


def _gaps(drawn: list[list[Any]]) -> str:
    """Seconds from one drawing to the next of the same view."""
    views = [[moment for _, moment in group] for _, group in itertools.groupby(drawn, key=lambda one: one[0])]
    gaps = [b - a for moments in views for a, b in itertools.pairwise(moments)]
    if not gaps:
        return "nothing was drawn twice"
    return f"{len(gaps)} drawings again, {statistics.median(gaps):.1f} s apart (median), {max(gaps):.1f} s at most"


if __name__ == "__main__":
    sys.exit(main())
