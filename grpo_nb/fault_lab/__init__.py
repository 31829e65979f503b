"""The fault lab: historic bugs of GRPO trainings, each put into a short real run, and the rules and guards that catch
it.

    lab = Lab.of(run)                       # a run with an SFT result
    trial = lab.trial(FAULTS["frozen_adapter"])
    trial.train()                           # the bug is in place while it trains, and gone after
    trial.outcome()                         # what the rules, guards and refusals found, and after how many steps

The trainer has no hook for any of it: a fault is a context manager that patches the package from outside.
"""

from grpo_nb.fault_lab.catalogue import FAULTS
from grpo_nb.fault_lab.lab import Lab, Trial
from grpo_nb.fault_lab.records import CLEAN, Fault, Outcome

__all__ = ["CLEAN", "FAULTS", "Fault", "Lab", "Outcome", "Trial"]
