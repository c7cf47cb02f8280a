"""A callback for lightning: `Trainer(callbacks=[ChannelsLast()])`."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from .lightning_hooks import LightningHooks


class ChannelsLast(LightningHooks, Callback):
    """Train in channels last, and say what the first step did to memory formats.

    >>> from lightning.pytorch import Trainer
    >>> callback = ChannelsLast()
    >>> trainer = Trainer(callbacks=[callback], logger=False, enable_checkpointing=False)

    Afterwards `callback.first_step` holds the audit of the first step.
    """

    def _say(self, text: str) -> None:
        rank_zero_info(text)
