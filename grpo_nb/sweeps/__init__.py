"""Studies: several settings and seeds, each a run of its own, compared over seeds."""

from grpo_nb.sweeps.plan import Arm
from grpo_nb.sweeps.study import Study, sweep

__all__ = ["Arm", "Study", "sweep"]
