"""Short experiments with our own models, for trials of two ranks on the CPU."""

from __future__ import annotations

from typing import Any


def experiment(*models: str, **changes: Any) -> dict[str, Any]:
    """An experiment with `models:small` or other models of this folder; several are an axis.

    `changes` are sections, of which single keys are changed, or other keys of the file.
    """
    names = [f"tests.distributed.{model}" for model in models or ("models:small",)]
    several = {"workload.model": names} if len(names) > 1 else {}
    base: dict[str, Any] = {
        "name": "tested",
        "workload": {"name": "classification", "model": names[0], "dataset": "digits"},
        "recipe": {"global_batch": 16, "steps": 6, "threads_per_rank": 1},
        "matrix": {"strategy": ["ddp"], "world_size": [2], **several},
        "measure": {
            "repeats": 1,
            **{"warmup_steps": 1, "sample_seconds": 0.1, "evaluate": "never", "verify": False},
            "max_remeasure": 0,  # other tests disturb it
        },
        "limits": {"trial_seconds": 300},
        "device": "cpu",
    }
    return base | {
        key: base[key] | value if isinstance(base.get(key), dict) else value
        for key, value in changes.items()
    }
