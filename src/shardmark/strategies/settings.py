"""The mathematics of a step as it is set everywhere; what one strategy adds, it adds itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmark.core.recipe import Recipe


def common_settings(recipe: Recipe) -> dict[str, object]:
    """Recorded with every rank, so that two results can be held against each other."""
    return {
        "gradient_reduction": "mean over ranks and micro-batches",
        "gradient_reduction_precision": "fp32",
        "gradient_clipping": recipe.gradient_clipping,
        "master_weights_precision": "fp32",
        "compute_precision": recipe.precision,
        "mixed_precision": "none" if recipe.precision == "fp32" else "autocast",
        "loss_scaling": (
            {"kind": "dynamic", "initial": 2.0**16, "growth_interval": 2000}
            if recipe.precision == "fp16"
            else None
        ),
        "weight_decay_groups": "one group, every parameter",
        "batch_norm": "statistics of each rank's share; rank 0's buffers are evaluated",
        "last_batch": "left out when incomplete",
        "tf32": recipe.tf32,
    }
