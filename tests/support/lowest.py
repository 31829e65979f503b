"""The lowest version that pyproject.toml allows of every package, as constraints for pip: see `make test-lowest`."""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PEER = "parity"
"""The extra whose one version is tested by itself."""


def constraints(pyproject: Path) -> list[str]:
    """`name==version` for each dependency, those of the extras too."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in extras if name != PEER for line in extras[name])]
    wanted = [requirement for requirement in map(Requirement, lines) if requirement.name != project["name"]]
    return sorted({f"{requirement.name}=={_lowest(requirement)}" for requirement in wanted})


def _lowest(requirement: Requirement) -> str:
    return next(bound.version for bound in requirement.specifier if bound.operator in (">=", "=="))


if __name__ == "__main__":
    print("\n".join(constraints(Path(sys.argv[1]))))
