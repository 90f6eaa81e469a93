"""Products with inputs of 8 bits: their casts, and how fast cards multiply them.

The matrices of a block's linear layers are cast, as torchao and Transformer Engine do; attention,
embeddings and the last layer are not.  Memory stays as it is: layers save their inputs in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardmark.predict.profile import Operation

PRODUCT_SHARE = 0.8
"""Fraction of the peak that products reach in 8 bits.  Set by hand between published rows of Llama
3 8B on H100, MI300X and B200, as `docs/method/prediction.md` says."""
INPUT_BYTES = 2 / 3
"""Fraction of a product's 16-bit bytes that are its two inputs; the rest is its result."""
CAST_BYTES = 1.5
"""Bytes that a cast moves for each byte of its 16-bit input, whose scale the operation before it
has found: it reads two bytes of each value and writes one."""


def in_fp8(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield a block's operations, with casts and 8-bit products in place of 16-bit products."""
    for operation in operations:
        if operation.kind != "product":
            yield operation
            continue
        inputs = operation.bytes.times(INPUT_BYTES)
        yield Operation(kind="other", bytes=inputs.times(CAST_BYTES), calls=2 * operation.calls)
        yield Operation(
            kind="fp8_product",
            flops=operation.flops,
            bytes=operation.bytes.times(1 - INPUT_BYTES / 2),
            calls=operation.calls,
        )
