"""Table of the zoo: training scripts with one fault each, and the cause that explains it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A script that trains wrong on two ranks, and right with `--right`."""

    script: str
    cause: str
    framework: str

    @property
    def until_epoch(self) -> bool:
        """True for a fault at the end of an epoch."""
        return self.cause == "short_window"

    @property
    def path(self) -> Path:
        return Path(__file__).with_name(f"{self.script}.py")


CASES = tuple(
    Case(script=script, cause=cause, framework=framework)
    for framework, causes in {
        "ddp": {
            "token_means": "uneven_weights",
            "stream_token_means": "uneven_weights",
            "late_token_means": "uneven_weights",
            "grpo_token_means": "uneven_weights",
            "left_padded_means": "uneven_weights",
            "sum_loss": "averaged_sum",
            "count_dropped": "averaged_sum",
            "averaged_twice": "averaged_twice",
            "summed_loss_averaged": "averaged_twice",
            "ranks_left_out": "averaged_twice",
            "own_data_divided_twice": "averaged_twice",
            "accumulation_not_divided": "accumulation_not_divided",
            "accumulation_divided_twice": "accumulation_divided_twice",
            "branch_not_divided": "accumulation_not_divided",
            "preferences_not_divided": "accumulation_not_divided",
            "squares_not_divided": "accumulation_not_divided",
            "tokens_of_two_steps": "divided_by_other_steps",
            "loss_scale_not_applied": "gradient_rescaled",
            "kept_gradients": "gradient_kept",
            "micro_batch_means": "uneven_micro_batches",
            "sample_weighted_means": "uneven_micro_batches",
            "accumulation_not_synchronised": "accumulation_not_synchronised",
            "late_no_sync": "accumulation_not_synchronised",
            "no_sampler": "same_data",
            "same_seed_sampling": "same_data",
            "weighted_sampling": "same_data",
            "stream_not_split": "same_data",
            "equal_noise": "equal_draws",
            "short_window": "short_window",
            "no_set_epoch": "same_order_every_epoch",
            "own_sampler_order": "same_order_every_epoch",
            "own_sampler_seed": "data_dropped",
            "dropped_data": "data_divided_twice",
            "different_start": "different_start",
            "unreduced_parameter": "not_reduced",
            "inner_module": "not_reduced",
            "steps_in_hooks": "not_reduced",
            "sequence_group_of_one": "group_too_small",
            "sequence_divided_twice": "multiplied_by_ranks",
            "sequence_part_means": "uneven_weights",
            "sequence_detached_keys": "gathered_without_gradients",
            "gan_local_critic": "not_reduced",
            "average_on_one_rank": "weights_changed_by_rank",
            "local_steps": "local_steps",
            "local_clip": "clipped_locally",
            "clip_each_micro_batch": "clipped_locally",
            "clip_before_unscale": "clipped_before_unscaling",
            "clip_norm_of_all_ranks": "clip_norm_counted_again",
            "scaled_learning_rate": "learning_rate_scaled",
            "sliced_learning_rate": "learning_rate_scaled",
            "buffers_drift": "buffers_differ",
            "normalised_inputs": "buffers_differ",
            "batch_norm_share": "batch_norm_of_share",
            "contrastive_local": "whole_batch_loss",
            "contrastive_detached": "gathered_without_gradients",
        },
        "fsdp2": {
            "fsdp2_summed": "summed",
            "fsdp2_local_clip": "clipped_locally",
            "fsdp2_mean_norm": "clip_norm_averaged",
            "fsdp2_norm_counted_again": "clip_norm_counted_again",
            "fsdp2_norm_of_rank": "clipped_locally",
            "late_adapter": "not_reduced",
            "optimizer_before_wrap": "optimizer_of_other_parameters",
            "untied_weights": "untied_weights",
        },
        "fsdp1": {
            "fsdp1_local_clip": "clipped_locally",
            "fsdp1_group_of_one": "group_too_small",
        },
        "deepspeed": {
            "deepspeed_accumulation": "accumulation_divided_twice",
            "deepspeed_token_means": "uneven_weights",
            "deepspeed_short_window": "short_window",
        },
        "transformers": {"trainer_token_means": "uneven_weights"},
        "accelerate": {"accelerate_token_means": "uneven_weights"},
        "fabric": {"fabric_no_loaders": "same_data"},
        "lightning": {"lightning_no_sampler": "same_data"},
    }.items()
    for script, cause in causes.items()
)

UNDECIDED = ("groups_by_stride",)
"""Scripts with a fault that one process has too, in another place: the audit cannot tell."""
