"""The forty requirements of the notebooks, each with the tests that prove it and the level at which they do.

A test says so itself: `@pytest.mark.ux(3, 4, at="browser")`. Levels: `unit`, `nbclient` (a real kernel, no browser),
`browser` (a real JupyterLab in Chromium).
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.conftest import ROOT

LEVELS = {"U": "unit", "N": "nbclient", "P": "browser"}
REQUIREMENTS = {
    1: ("N P", "each notebook, Run All on a CPU: every cell finishes"),
    2: ("P", "the training cell returns at once, the panel says running, the step moves"),
    3: ("P", "beta of one objective is active at the next step, the other's stays"),
    4: ("P U", "temperature is active at the next rollout and in its row"),
    5: ("N P", "kernel restarted midway: it goes on, and the rows are those of an uninterrupted run"),
    6: ("P", "another cell answers while it trains"),
    7: ("P", "one interrupt: stopping after this step, saved, no wall of traceback"),
    8: ("P", "Stop, then Resume goes on from there"),
    9: ("P", "the tab reloaded after saving: the panel is there and alive"),
    10: ("P", "the tab reloaded before saving: attach shows the same run, live"),
    11: ("U", "killed while a checkpoint is written: the one before is used, the damaged one named"),
    12: ("N P", "a second start is refused with run and choices"),
    13: ("N P", "a worker that raises: red, short, logged; the waiting cell fails, Run All ends"),
    14: ("U", "out of memory: what to lower; memory is freed; the same kernel can start again"),
    15: ("U", "not-a-number: nothing is applied; step, objective and quantity are named"),
    16: ("P", "200 steps: every panel drawn, of one size, one picture a second at most"),
    17: ("U P", "cut answers: a warning that names max_completion_length"),
    18: ("U P", "groups of equal reward: no learning signal, with the share"),
    19: ("P", "a loss near 0 is explained, and reward is the headline"),
    20: ("U P", "after a resume the curves join, with a mark"),
    21: ("P", "beta is shown and taken exactly"),
    22: ("P", "keyboard only: every control reached, moved and named"),
    23: ("P U", "beta given to its controller and taken back"),
    24: ("U P", "a value out of bounds is refused with the bounds"),
    25: ("U N", "code edited midway is said, and changes nothing"),
    26: ("U", "imported twice or reloaded: no second worker, no lost run"),
    27: ("N P", "run again when complete: reused, fresh=True offered"),
    28: ("N", "what the machine lacks is said at the top"),
    29: ("N", "a notebook before its predecessor says which it needs"),
    30: ("U", "the committed notebooks are valid and render"),
    31: ("N", "the rendered page works offline"),
    32: ("N", "headless gives the numbers of the browser"),
    33: ("U", "one seed, one metrics file"),
    34: ("P U", "samples: few, newest first, folded, small, inert"),
    35: ("U", "the header says hardware and measured time"),
    36: ("U", "the panel costs the training next to nothing"),
    37: ("U P", "a second notebook sees who owns the run"),
    38: ("N", "diagnostics from a log alone, without a model"),
    39: ("U", "running everything leaves the repository as it was"),
    40: ("P", "JupyterLab without subshells: 2 to 4 hold"),
}
"""Levels asked for, and what a user must see."""
OUGHT = {(number, LEVELS[letter]) for number, (letters, _) in REQUIREMENTS.items() for letter in letters.split()}
NEVER = {"skip", "skipif", "xfail"}


@dataclass(frozen=True)
class Proof:
    """One test that says which requirements it proves."""

    test: str
    numbers: tuple[int, ...]
    level: str
    marks: frozenset[str]


@functools.cache  # when a test asks: collecting these in a process that runs other files parses nothing
def proofs() -> tuple[Proof, ...]:
    """Every test with a `ux` mark, as its source has it."""
    return tuple(_all_proofs())


def _all_proofs() -> Iterator[Proof]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        everywhere = [m for node in tree.body if isinstance(node, ast.Assign) for m in _marks_of_module(node)]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield from _proofs(f"{path.name}::{node.name}", [*node.decorator_list, *everywhere])


def _proofs(test: str, decorators: list[ast.expr]) -> Iterator[Proof]:
    marks = frozenset(filter(None, map(_mark, decorators)))
    for decorator in decorators:
        if _mark(decorator) == "ux" and isinstance(decorator, ast.Call):
            numbers = tuple(ast.literal_eval(argument) for argument in decorator.args)
            (level,) = (ast.literal_eval(k.value) for k in decorator.keywords if k.arg == "at")
            yield Proof(test, numbers, level, marks)


def _marks_of_module(node: ast.Assign) -> list[ast.expr]:
    if [getattr(target, "id", "") for target in node.targets] != ["pytestmark"]:
        return []
    return node.value.elts if isinstance(node.value, ast.List) else [node.value]


def _mark(decorator: ast.expr) -> str | None:
    """`slow` of `pytest.mark.slow` or `pytest.mark.slow(...)`."""
    at = decorator.func if isinstance(decorator, ast.Call) else decorator
    is_mark = isinstance(at, ast.Attribute) and isinstance(at.value, ast.Attribute) and at.value.attr == "mark"
    return at.attr if is_mark and isinstance(at, ast.Attribute) else None


def test_every_requirement_is_proven_at_the_levels_it_asks_for() -> None:
    assert list(REQUIREMENTS) == list(range(1, 41))
    proven: dict[tuple[int, str], list[str]] = defaultdict(list)
    for proof in proofs():
        for number in proof.numbers:
            proven[number, proof.level].append(proof.test)
    missing = [f"{number} at {level}: {REQUIREMENTS[number][1]}" for number, level in sorted(OUGHT - proven.keys())]
    assert not missing, "no test proves\n" + "\n".join(missing)


def test_no_proof_is_skipped_or_claims_another_level() -> None:
    for proof in proofs():
        assert not proof.marks & NEVER, f"{proof.test}: a proof that is skipped proves nothing"
        assert set(proof.numbers) <= REQUIREMENTS.keys() and proof.level in LEVELS.values(), proof.test
        in_browser = (proof.level == "browser", "browser" in proof.marks)
        assert in_browser[0] == in_browser[1], f"{proof.test}: the browser marker says what it runs in"


def test_a_mark_is_read_from_the_source() -> None:
    tree = ast.parse('pytestmark = [pytest.mark.slow]\n@pytest.mark.ux(3, 4, at="unit")\ndef test_it(): ...\n')
    module, test = tree.body
    assert isinstance(module, ast.Assign) and isinstance(test, ast.FunctionDef)
    (proof,) = _proofs("test_it", [*test.decorator_list, *_marks_of_module(module)])
    assert proof == Proof("test_it", (3, 4), "unit", frozenset({"ux", "slow"}))
