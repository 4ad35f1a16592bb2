"""The number of blocks in sums over ranks; every rank holds whole blocks."""

BLOCKS = 4
"""The default, for groups of 1, 2 and 4 ranks."""


def check_blocks(blocks: int, tp: int) -> None:
    """Raise ValueError unless `blocks` is a power of two that `tp` divides."""
    if blocks < 1 or blocks & (blocks - 1):
        raise ValueError(f"blocks={blocks} must be a power of two: the sums of the blocks are added as a binary tree")
    if blocks % tp:
        raise ValueError(
            f"tp={tp} does not divide blocks={blocks}, the parts that every sum over the ranks is made of; use tp in "
            f"{{{', '.join(str(1 << n) for n in range(blocks.bit_length()))}}}"
            + (f", or blocks={tp}" if tp & (tp - 1) == 0 else "")
        )
