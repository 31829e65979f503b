"""The memory plan of settings while they are edited: made in a thread, once no edit has come for a moment."""

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import ipywidgets as w

from grpo_nb.config import Config
from grpo_nb.printable import clean_logger
from grpo_nb.report.markup import html

if TYPE_CHECKING:  # slow to import, so the form leaves it to its thread
    from grpo_nb.policy.shapes import ModelShape

logger = clean_logger(__name__)

DELAY_SECONDS = 0.4
"""Seconds from the last edit to the plan."""


class PlanView:
    """Shows what training the newest configuration needs of this machine; a model's sizes are read when it is named."""

    def __init__(self) -> None:
        self.widget = w.HTML()
        self.shown: Config | None = None
        """Whose plan is shown."""
        self._wanted: Config | None = None
        self._model: tuple[str, ModelShape | Exception] | None = None
        """The last model that was looked up, and its sizes or why they cannot be read."""
        self._timer: threading.Timer | None = None
        self._state = threading.Lock()
        self._planning = False
        """Whether a thread plans: it continues with what is wanted by then, so that no other has to wait for it."""

    def show(self, config: Config) -> None:
        """Plan this configuration soon, unless another comes first."""
        with self._state:
            self._stop()
            self._wanted = config
            self._timer = threading.Timer(DELAY_SECONDS, self._plan)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Plan nothing more."""
        with self._state:
            self._stop()
            self._wanted = None

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _plan(self) -> None:
        with self._state:
            if self._planning:
                return
            self._planning = True
        while (config := self._next()) is not None:
            value = self._html(config)
            if self._wanted is not None:  # not closed meanwhile
                self.widget.value, self.shown = value, config

    def _next(self) -> Config | None:
        """The configuration to plan; None where the newest is shown, which ends the planning."""
        with self._state:
            self._planning = self._wanted is not None and self._wanted is not self.shown
            return self._wanted if self._planning else None

    def _html(self, config: Config) -> str:
        try:
            from grpo_nb.policy import memory
            from grpo_nb.report import tables

            plan = memory.plan(config, self._shape(config))
            table = replace(tables.memory(plan), folded=True)._repr_html_()
        except Exception as error:  # a model that is not here, a device that is missing: the form stays
            logger.info("no plan of %s", config.model.name, exc_info=True)
            return str(html("note", text=f"no memory plan: {error}"))
        return str(html("still", text=None, inside=[html("note", text=config.geometry), table]))

    def _shape(self, config: Config) -> "ModelShape":
        from grpo_nb.policy import shapes

        name = config.model.name
        if self._model is None or self._model[0] != name:
            try:
                self._model = name, shapes.shape_of(name, config.run.seed)
            except Exception as error:  # not looked for again until another model is named
                self._model = name, error
        found = self._model[1]
        if isinstance(found, Exception):
            raise found
        return found
