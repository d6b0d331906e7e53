"""Which free block serves a request: best fit, and what it must not be.

Source: ``get_free_block`` in ``c10/cuda/CUDACachingAllocator.cpp``. Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpsim.allocator.blocks import Block
from fsdpsim.allocator.errors import UnsupportedSettingsError
from fsdpsim.allocator.expandable import expanded_size
from fsdpsim.allocator.settings import AllocatorSettings
from fsdpsim.allocator.sizes import MIN_BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class SearchRules:
    """The settings that a search depends on."""

    expandable: bool
    max_split_size: int
    max_non_split_rounding: int

    @classmethod
    def of(cls, settings: AllocatorSettings) -> SearchRules:
        """Take them from all settings."""
        return cls(
            settings.expandable_segments,
            settings.max_split_size,
            settings.max_non_split_rounding,
        )

    def candidate(self, blocks: list[Block], position: int, size: int) -> int:
        """Return where the block to use is, from the best fit at ``position``; the end if none.

        Only one candidate is tested against the oversize rules.
        """
        end = len(blocks)
        if position < end and blocks[position].segment.expandable:
            step = _skip_to_best_expandable if self.expandable else _skip_expandable
            position = step(blocks, position)
        if position == end:
            return end
        block, limit = blocks[position], self.max_split_size
        if size < limit:
            return end if block.size >= limit else position
        if block.size >= size + self.max_non_split_rounding:
            return end
        self._refuse_to_split_oversize(block, size)
        return position

    def _refuse_to_split_oversize(self, block: Block, size: int) -> None:
        if not self.expandable or block.segment.expandable or block.size - size < MIN_BLOCK_SIZE:
            return
        raise UnsupportedSettingsError(
            "expandable_segments was turned on together with max_split_size_mb while oversize"
            " cudaMalloc segments were cached: torch would split one and could cudaFree it while"
            " it is partly used"
        )


def _skip_expandable(blocks: list[Block], position: int) -> int:
    while position < len(blocks) and blocks[position].segment.expandable:
        position += 1
    return position


def _skip_to_best_expandable(blocks: list[Block], position: int) -> int:
    """Walk to larger blocks while they can grow to less: the tail of a range counts as huge."""
    following = position + 1
    while (
        following < len(blocks)
        and blocks[position].segment.expandable
        and expanded_size(blocks[following]) < expanded_size(blocks[position])
    ):
        position, following = following, following + 1
    return position
