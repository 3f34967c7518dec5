"""A calibration, from texts to what policies judge by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvkeep import __version__
from kvkeep.calibrated import LayerStatistics
from kvkeep.calibration.collecting import CopyWatch, QueryWatch, Watch
from kvkeep.errors import TaskError, UnsupportedError
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.calibrations import Calibration
from kvkeep.hf.models import model_sha256
from kvkeep.hf.support import CACHE_ARGUMENT, unwrap
from kvkeep.tasks.pieces import beginning, cut_pieces
from kvkeep.tasks.text import Message, digest_of

SHORTEST = 32  # tokens of a text


def calibrate(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Message],
    *,
    corpus: str,
    name: str = "",
    texts: int = 16,
    length: int = 1024,
    sinks: int = 4,
    on_text: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Let a model read, and take down the statistics of its queries and of its heads.

    Each text is read twice: as it is, for the queries; and its first half two times over, for the heads that go back to
    the first time. Works on any supported model; layers of full attention are measured.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        documents: to take texts from; see `cut_pieces`.
        corpus: what they are called, for the record.
        name: of the model, for the record.
        texts: how many to read, at most.
        length: tokens of each.
        sinks: first tokens of each text whose queries are left out.
        on_text: told after each text how many are done, and how many there are.

    Raises:
        TaskError: no texts, or some that are too short.
        UnsupportedError: a model that kvkeep has not checked, or one whose rotations change with the text, or whose
            queries or attention are no finite numbers.
    """
    if texts < 1 or length < SHORTEST or sinks < 0 or sinks >= length // 2:
        raise TaskError(
            expected=f"one or more texts of at least {SHORTEST} tokens, less than half of them sinks",
            received=f"texts {texts}, length {length}, sinks {sinks}",
            remedy="16 texts of 1024 tokens and 4 sinks are usual",
        )
    pieces = list(cut_pieces(documents, tokenizer, length=length, count=texts))
    if not pieces:
        raise TaskError(
            expected=f"a text of at least {length} tokens",
            received=f"{len(documents)} shorter ones in {corpus}",
            remedy="give longer texts, or a smaller --length",
        )
    begin = beginning(tokenizer)
    half = (length - len(begin)) // 2
    queries, copies = QueryWatch(sinks), CopyWatch(half)
    for done, piece in enumerate(pieces, start=1):
        _read(model, [*begin, *piece][:length], queries)
        _read(model, [*begin, *piece[:half], *piece[:half]], copies)
        on_text(done, len(pieces))
    facts = {
        "model_sha256": model_sha256(unwrap(model)),
        "model": name,
        "corpus": corpus,
        "digest": digest_of(documents),
        "texts": len(pieces),
        "length": length,
        "sinks": sinks,
        "queries": next(iter(queries.before.values())).count,
        "dtype": str(unwrap(model).dtype).removeprefix("torch."),
        "version": __version__,
    }
    return Calibration(_statistics(model, queries, copies), facts)


def _read(model: Any, ids: Sequence[int], watch: Watch) -> None:
    """One forward that shows every layer to `watch`, and keeps nothing."""
    cache = KeepCache(model, watch, entries=1)
    with torch.no_grad():
        model(input_ids=torch.tensor([list(ids)], device=model.device), logits_to_keep=1, **{CACHE_ARGUMENT: cache})


def _statistics(model: Any, queries: QueryWatch, copies: CopyWatch) -> dict[int, LayerStatistics]:
    config = unwrap(model).config.get_text_config(decoder=True)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    found = {}
    for layer, moments in queries.before.items():
        copying = torch.stack(copies.found[layer]).mean(0).float()
        if not bool(moments.squares.isfinite().all() and copying.isfinite().all()):
            raise UnsupportedError(
                expected="a model whose queries and attention are finite numbers",
                received=f"NaN or infinity in layer {layer}",
                remedy="load it in a wider dtype, such as float32; if it is in float32, its weights are damaged",
            )
        directions = queries.after[layer].main_directions()  # [H, D]
        found[layer] = LayerStatistics(
            query_mean=moments.mean.float(),
            query_covariance=moments.covariance.float(),
            filters=directions.view(kv_heads, -1, directions.shape[-1]).mean(1).float(),
            copying=copying,
        )
    return found
