"""Costs of parameter servers, as a worker sees them."""

from __future__ import annotations

from collections.abc import Mapping

from shardmark.base.traffic import RequiredTraffic, Traffic
from shardmark.extras.parameter_server.strategy import ParameterServer
from shardmark.ranks.costs.base import (
    FP32_BYTES,
    PRECISION_BYTES,
    Cell,
    Costs,
    StepState,
    UnitState,
)


class ParameterServerCosts(Costs[ParameterServer]):
    """Costs of one push of gradients and one pull of parameters a step."""

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        """Traffic of a step does not depend on the number of its micro-batches."""
        payload = cell.size.trained_parameters * PRECISION_BYTES[self.strategy.wire]
        return RequiredTraffic(
            traffic=tuple(
                Traffic(
                    kind=kind,
                    payload_bytes=payload,
                    ranks=cell.world_size + self.strategy.servers,
                    waited_for=True,
                    crossing=(cell.nodes - 1) / cell.nodes if cell.nodes > 1 else 1.0,
                )
                for kind in ("send", "receive")
            ),
            formula="gradients to the servers, parameters back: G + P",
        )

    def library_work(self, cell: Cell) -> Mapping[str, float]:
        """Each server serves all workers, one after the other."""
        name = "ps-sync" if self.strategy.staleness_bound == 0 else "ps-async"
        return {"ps": 1, f"{name} worker": cell.world_size, "ps tensor": cell.size.trained_tensors}

    def step_state(self, cell: Cell) -> StepState:
        """Gradients are views of the buckets, which stay; a CPU also holds cast messages."""
        trained = cell.all_trained_parameters
        casts = cell.device_type == "cpu" and self.strategy.wire != "fp32"
        return StepState(
            parameters=cell.stored_bytes,
            gradients=FP32_BYTES * trained,
            fresh_gradients=0.0,
            optimizer_share=0.0,
            buffers=2.0 * PRECISION_BYTES[self.strategy.wire] * trained if casts else 0.0,
            units=(UnitState(),) * len(cell.units),
        )
