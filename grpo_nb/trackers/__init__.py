"""Mirrors of a run in TensorBoard, W&B, trackio and MLflow: they follow its logs, which remain authoritative."""

from grpo_nb.trackers.mirror import mirroring
from grpo_nb.trackers.ready import check

__all__ = ["check", "mirroring"]
