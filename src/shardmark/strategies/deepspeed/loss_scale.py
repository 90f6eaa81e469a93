"""The loss scale of every strategy, in the place of DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardmark.strategies.base import LOSS_SCALE

if TYPE_CHECKING:
    from torch import Tensor


class LossScale:
    """`torch.amp.GradScaler`'s rule behind the interface of DeepSpeed's scalers.

    DeepSpeed calls `update_scale` before it divides the gradients, so growth waits for the next
    loss.
    """

    dynamic = True

    def __init__(self) -> None:
        self.cur_scale = LOSS_SCALE["initial"]
        self._good_steps = 0

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def get_scale(self) -> float:
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        if self._good_steps == LOSS_SCALE["growth_interval"]:
            self._good_steps = 0
            self.cur_scale *= LOSS_SCALE["growth_factor"]
        return loss * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        self._good_steps = 0 if overflow else self._good_steps + 1
        if overflow:
            self.cur_scale *= LOSS_SCALE["backoff_factor"]

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.cur_scale, "good_steps": self._good_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.cur_scale, self._good_steps = float(state_dict["scale"]), int(state_dict["good_steps"])


def scale_losses(optimizer: Any) -> None:
    """Have a ZeRO optimizer of stage 1 to 3 scale autocast's fp16 as all strategies do.

    DeepSpeed 0.19 has a `GradScaler` of torch's there, but clips and looks for overflow before it
    is asked: gradients are clipped while they are scaled, and after an overflow the scale never
    falls, so that every later step is skipped.
    """
    optimizer.torch_autocast_gradscaler = None
    optimizer.loss_scaler = LossScale()
    optimizer.dynamic_loss_scale = True
