"""What a cache will weigh, from the model's configuration alone: no weights are loaded and nothing is run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvkeep.budget import POSITION_BYTES, Budget, LayerShape
from kvkeep.errors import ModelFileError
from kvkeep.hf.budgets import cell_budgets
from kvkeep.hf.convert import quiet
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.second_pass import look_back_bytes, score_bytes
from kvkeep.hf.sources import DTYPES, find_source
from kvkeep.hf.support import LayerPlan, plan_model
from kvkeep.policies import Ada, Flat, Policy, PromptPolicy, Pyramid, Threshold, TopK, Uniform

# They spend the whole budget, whatever the scores are.
_SPENDERS = (Uniform, Ada, Flat, Pyramid, Threshold)


@dataclass(frozen=True)
class CachePlan:
    """The ledger of a prompt of one row, right after its cut, as `Ledger` would count it.

    Attributes:
        context_length: tokens of the prompt; the logical length at the cut.
        cells: (layer, KV head) pairs that are evicted.
        entries_per_cell: kept on average.
        entries: kept, over all cells.
        entries_full: of the full cache.
        payload_bytes: keys and values of the kept entries.
        metadata_bytes: their positions and offsets.
        held_bytes: both; the prompt policies have no state, and a cut leaves no slack.
        window_bytes: what sliding layers hold.
        full_bytes: keys and values of the full cache, over the evictable layers.
        fraction: held / full.
        peak_bytes: the most held at once while the prompt is processed.
        held_is_exact: false where the scores decide how much of the budget is used: then these are upper bounds.
        peak_is_exact: false where the scores decide the peak: then it is an upper bound. For policies that make the
            model repeat the text, the request to do so is left out where none was given.
        max_position_embeddings: positions that the model was trained on, if it says so.
    """

    context_length: int
    cells: int
    entries_per_cell: int
    entries: int
    entries_full: int
    payload_bytes: int
    metadata_bytes: int
    held_bytes: int
    window_bytes: int
    full_bytes: int
    fraction: float
    peak_bytes: int
    held_is_exact: bool
    peak_is_exact: bool
    max_position_embeddings: int | None

    def to_dict(self) -> dict[str, Any]:
        """All of it, as it goes into results."""
        return asdict(self)


def plan_cache(
    model: Any,
    policy: PromptPolicy,
    budget: Budget,
    context_length: int,
    repeat_prompt: RepeatPrompt | None = None,
) -> CachePlan:
    """What a cache of `model` under `policy` will hold of a prompt, and its peak.

    The peak of a policy that decides layer by layer is reached in the last evicted layer: all earlier layers are cut,
    this one is held dense together with what stays of it. A policy that waits for all layers holds all of them dense.
    A second pass waits too, and copies one layer at a time, with room for what is repeated.

    Args:
        model: a supported model; `empty_model` will do.
        policy: governs all evictable layers.
        budget: how much may stay.
        context_length: tokens of the prompt, at least 1.
        repeat_prompt: as for `KeepCache`.

    Raises:
        BudgetError: the budget cannot be kept.
        UnsupportedError: a model that kvkeep has not checked.
    """
    plans = plan_model(model)
    shapes = [plan.shape for plan in plans if plan.window is None]
    kept = cell_budgets(budget, [context_length], plans, [policy] * len(shapes))[0]
    cells = sum(shape.kv_heads for shape in shapes)
    payload = sum(shape.kv_heads * kept * shape.entry_bytes for shape in shapes)
    held = sum(shape.bytes_for(1, kept) for shape in shapes)
    full = sum(shape.kv_heads * context_length * shape.entry_bytes for shape in shapes)
    exact = kept == context_length or _spends_all(policy)
    return CachePlan(
        context_length=context_length,
        cells=cells,
        entries_per_cell=kept,
        entries=cells * kept,
        entries_full=cells * context_length,
        payload_bytes=payload,
        metadata_bytes=held - payload,
        held_bytes=held,
        window_bytes=sum(plan.window_bytes(context_length) for plan in plans),
        full_bytes=full,
        fraction=held / full,
        peak_bytes=_peak(plans, policy, kept, context_length, repeat_prompt or RepeatPrompt()),
        held_is_exact=exact,
        peak_is_exact=exact and (policy.scope == "layer" or kept == context_length),
        max_position_embeddings=getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None),
    )


def empty_model(name_or_path: str | PathLike[str], dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """A model without its weights, from its configuration.

    Args:
        name_or_path: as for `load_model`; a known model must have been fetched.
        dtype: as for `load_model`.

    Raises:
        ModelFileError: no configuration of a causal language model there, or one that does not tell the type.
        UnsupportedError: an unknown dtype.
    """
    source = find_source(name_or_path)
    kind, path = source.dtype(dtype), source.path
    if source.kind == "known" and path is not None and not path.is_dir():
        raise ModelFileError(
            expected=f"the fetched model {source.name!r}, whose configuration tells the sizes",
            received=f"no folder {path}",
            remedy=f"run `kvkeep models fetch {source.name}` first",
        )
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": path is not None}
    place: str | Path = source.name if path is None else path
    if path is not None and source.kind == "gguf":
        place, options["gguf_file"] = path.parent, path.name
    try:
        with quiet(), torch.device("meta"):
            config = AutoConfig.from_pretrained(place, **options)
            known = kind if kind != "auto" else getattr(config.get_text_config(decoder=True), "dtype", None)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=known, trust_remote_code=False)
    except Exception as error:  # readers of files, parsers and the hub's client raise errors of many kinds
        raise ModelFileError(
            expected=f"the configuration of a causal language model at {source.name!r}"
            + ("" if path is not None else " (no such path here, so an id of the hub)"),
            received=f"{type(error).__name__}: {error}",
            remedy="check the path or the id, and that the hub can be reached for an id",
        ) from error
    if known is None:
        raise ModelFileError(
            expected=f"a configuration that tells the type of the weights, at {source.name!r}",
            received="none",
            remedy=f"say which: {', '.join(DTYPES)}",
        )
    return model


def _spends_all(policy: PromptPolicy) -> bool:
    """Whether the policy keeps exactly what the budget allows, whatever the scores are."""
    return isinstance(policy, Policy) and type(policy.allocator) in _SPENDERS and type(policy.selector) is TopK


def _dense_bytes(shape: LayerShape, length: int) -> int:
    """A layer before its cut: keys and values, and one position for each token."""
    return length * (shape.kv_heads * shape.entry_bytes + POSITION_BYTES)


def _peak(plans: list[LayerPlan], policy: PromptPolicy, kept: int, length: int, prompt: RepeatPrompt) -> int:
    """Layer by layer as `Ledger.record` sees it; while a layer is cut, it is held twice."""
    held = peak = 0
    evicted = [plan.shape for plan in plans if plan.window is None]
    passes = policy.needs().second_passes
    for plan in plans:
        if plan.window is not None:
            held += plan.window_bytes(length)
        elif policy.scope == "layer" and not passes:
            peak = max(peak, held + _dense_bytes(plan.shape, length) + plan.shape.bytes_for(1, kept))
            held += plan.shape.bytes_for(1, kept)
        else:
            held += _dense_bytes(plan.shape, length)
        peak = max(peak, held)
    if policy.scope == "model":
        # All are dense when the first one is cut. The scores decide how much it keeps: all of it, at most.
        most = min(length, kept * len(evicted))
        peak = held + evicted[0].bytes_for(1, most)
    if passes:
        # The last pass has the scores of all of them beside it.
        scores = len(passes) * sum(score_bytes(shape, length) for shape in evicted)
        beside = max(look_back_bytes(shape, length, prompt, each) for shape in evicted for each in passes)
        peak = max(peak, held + evicted[0].bytes_for(1, kept), held + beside) + scores
    return peak
