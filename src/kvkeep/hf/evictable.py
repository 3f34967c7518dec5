"""What the evictable layers of a KeepCache have in common: what transformers asks of them, and the cache itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvkeep.hf.attention import Handle, KeptLength
from kvkeep.hf.progress import Progress, running
from kvkeep.store import RaggedLayer, SlotLayer


class EvictableLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """A layer of full attention whose entries a policy may evict.

    Args:
        index: of the layer in the model.
        progress: shared by all layers of the cache.
    """

    is_sliding = False
    supports_early_init = False
    store: RaggedLayer | SlotLayer

    def __init__(self, index: int, progress: Progress) -> None:
        super().__init__()
        self.index = index
        self.progress = progress
        self.record: Callable[[], None] = lambda: None

    # -- what transformers asks ------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store takes its shape from the first tokens."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hand the new tokens to the attention function, which stores them after it has taken them out."""
        running(self.progress)
        handle = Handle(self, key_states, value_states)
        return handle, handle

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask; the length is marked, so that no q x L mask is built."""
        return KeptLength(self.progress.columns + query_length), 0

    def get_seq_length(self) -> int:
        """Tokens seen, padding included, whatever was evicted: positions follow this."""
        return self.progress.columns

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit; the name before transformers 5.17."""
        return -1

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
