"""Attributes in which DeepSpeed 0.19 keeps tensors, and which it does not document.

A test looks for each of them in the source of the installed version.
"""

from __future__ import annotations

REPLICATED_PARAMETERS = "bit16_groups_flat"
"""Stages 1 and 2: all parameters, flat."""
COMPUTED_PARTITIONS = "fp16_partitioned_groups_flat"
"""Stage 3: this rank's partitions, in the precision of the computation."""
PERSISTENT_PARAMETERS = "persistent_parameters"
"""Stage 3: parameters that stay whole on every rank."""
PARAMETERS = (REPLICATED_PARAMETERS, COMPUTED_PARTITIONS)
MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
"""Stages 1 and 2, stage 3: this rank's fp32 partitions."""
GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "ipg_buckets",
    "grad_partitions_flat_buffer",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
)
ENGINE_SCALER = "torch_autocast_z0_gradscaler"
"""Stage 0, of the engine itself."""
OPTIMIZER_SCALER = "loss_scaler"
"""The other stages, of its optimizer, with what else `loss_scale.py` replaces."""
REPLACED = ("torch_autocast_gradscaler", OPTIMIZER_SCALER, "dynamic_loss_scale")
STATES_LINKED, LINK_STATES = "_hp_optimizer_states_linked", "_lazy_init_hp_params_optimizer_state"
"""Stages 1 and 2: whether parameters know their parts of the state, and what makes them know."""

DEFINED_IN = {
    "engine.py": (ENGINE_SCALER,),
    "zero/stage_1_and_2.py": (
        REPLICATED_PARAMETERS,
        MASTERS[0],
        *GRADIENTS[:3],
        *REPLACED,
        STATES_LINKED,
    ),
    "zero/stage3.py": (
        COMPUTED_PARTITIONS,
        PERSISTENT_PARAMETERS,
        MASTERS[1],
        GRADIENTS[0],
        *GRADIENTS[2:],
        *REPLACED,
    ),
}
"""File of DeepSpeed's `runtime` package -> what it assigns."""
