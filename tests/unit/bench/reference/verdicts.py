"""A verdict of each kind."""

from __future__ import annotations

from shardmark.base.evidence.checks import Check
from shardmark.base.results.verification import Cause, Verdict, Verification
from tests.golden.invented import invented_verdict

GOOD = invented_verdict(
    id="1" * 12,
    strategy_options={"bucket_mb": 1.0},
    varied={"recipe.seed": 4},
    checks=(
        Check(name="initial weights", holds=True, found="ab", expected="ab", tolerance=None),
        Check(
            name="losses",
            holds=True,
            found=0.25e-6,
            expected=0.0,
            tolerance=1e-6,
            where="rank 1, step 2",
            in_tolerances=0.25,
        ),
    ),
)
BAD = invented_verdict(
    "zero-1",
    id="2" * 12,
    equivalent=False,
    checks=(
        Check(
            name="parameters after the first update",
            holds=False,
            found=9e-4,
            expected=0.0,
            tolerance=1e-6,
            where="fc.weight",
            in_tolerances=900.0,
        ),
    ),
    cause=Cause(
        text="gradients are clipped to norm 1, DeepSpeed's default",
        evidence="the reference with this change differs by 0.2 tolerances",
        setting="gradient_clipping",
        first_deviation="parameters after the first update (fc.weight)",
    ),
)


def untried(evidence: str) -> Verdict:
    cause = Cause(text="not tried", evidence=evidence, first_deviation="none")
    return BAD.model_copy(
        update={
            "id": "3" * 12,
            "strategy": "dp",
            "equivalent": None,
            "checks": (),
            "cause": cause,
        }
    )


UNAVAILABLE = untried("unavailable: no CUDA device; use ddp")
FAILED = untried("failed: rank 1 was killed")
PROMISED = GOOD.model_copy(
    update={"id": "4" * 12, "equivalent": None, "guarantee": "every push is applied once"}
)
BROKEN = PROMISED.model_copy(update={"equivalent": False, "cause": BAD.cause})

VERIFICATION = Verification(reference="the reference", steps=3, verdicts=(GOOD, BAD, UNAVAILABLE))
