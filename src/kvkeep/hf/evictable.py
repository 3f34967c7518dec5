"""What the evictable layers of a KeepCache have in common: what transformers asks of them, and the cache itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.hf.attention import HandingLayer
from kvkeep.hf.progress import Progress, running
from kvkeep.store import RaggedLayer, SlotLayer


class EvictableLayer(HandingLayer):
    """A layer of full attention whose entries a policy may evict.

    Args:
        index: of the layer in the model.
        progress: shared by all layers of the cache.
    """

    store: RaggedLayer | SlotLayer

    def __init__(self, index: int, progress: Progress) -> None:
        super().__init__()
        self.index = index
        self.progress = progress
        self.record: Callable[[], None] = lambda: None

    # -- what transformers asks ------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hand the new tokens to the attention function, in a forward that has begun."""
        running(self.progress)
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Tokens seen, padding included, whatever was evicted: positions follow this."""
        return self.progress.columns

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return self.store.batch or -1

    @abstractmethod
    def reset(self) -> None:
        """Hold nothing."""

    @abstractmethod
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.reorder_cache(torch.arange(self.store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self.reorder_cache(torch.arange(self.store.batch, device=indices.device)[indices])

    # -- what the cache asks ---------------------------------------------------------------------------------------

    @abstractmethod
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the new tokens `[B, H_kv, q, D]` and attend.

        Args:
            module: the attention module, for policies that ask for its rotation or output projection.
            query: `[B, H, q, D]`.
            key: `[B, H_kv, q, D]`.
            value: `[B, H_kv, q, D]`.
            scaling: factor on the dot products.

        Returns:
            `[B, q, H, D]`.
        """

    @abstractmethod
    def snapshot(self) -> Any:
        """The present entries, for `restore`."""

    @abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Hold the entries of a snapshot."""

    @abstractmethod
    def branch(self) -> None:
        """Be independent of the layer that this one was copied from."""

    @abstractmethod
    def export(self) -> dict[str, Tensor]:
        """The entries as they go into a file."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor], batch: int, kv_heads: int) -> None:
        """Hold what `export` gave, `batch` rows of `kv_heads` KV heads."""
