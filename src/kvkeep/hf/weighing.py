"""What a cache really weighs: every storage that it keeps alive, counted once, whoever made the cache."""

from __future__ import annotations

import inspect
import re
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvkeep.errors import UnsupportedError
from kvkeep.policies import OnlinePolicy

# keys, tail_values, _quantized_keys, key_cache, value_states; not masked_key_indices.
_CONTENT = re.compile(r"(^|_)(keys?|values?)(_cache|_states)?$")
# Lists of which each element is a layer, or a layer's part in caches of older libraries.
_LAYER_LISTS = ("layers", "key_cache", "value_cache")
_SEQUENCES = (list, tuple, set, frozenset, deque)
# What holds no tensors of its own, or those of somebody else.
_SKIPPED = (
    *(str, bytes, bytearray, int, float, complex, type, types.NoneType),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, weakref.ReferenceType),
    *(torch.dtype, torch.device, torch.Generator, nn.Module),
)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer.

    Attributes:
        name: the way to it from the cache, such as `layers[3]` or `self_attention_cache.layers[3]`.
        keys_values: storages of keys and values, quantised ones with their scales.
        other: all other storages: positions, offsets, masks, counters.
    """

    name: str
    keys_values: int
    other: int

    @property
    def total(self) -> int:
        """Both."""
        return self.keys_values + self.other


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that a cache keeps alive, each storage once.

    Attributes:
        layers: in order. A storage that layers share is counted in the first of them.
        outside: what belongs to no layer.
        devices: bytes by device, such as `{"cpu": 4096}`.
    """

    layers: tuple[LayerBytes, ...]
    outside: LayerBytes
    devices: Mapping[str, int]

    @property
    def keys_values(self) -> int:
        """Storages of keys and values."""
        return sum(layer.keys_values for layer in (*self.layers, self.outside))

    @property
    def other(self) -> int:
        """All other storages."""
        return sum(layer.other for layer in (*self.layers, self.outside))

    @property
    def total(self) -> int:
        """All of it."""
        return self.keys_values + self.other

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        sums = {"total": self.total, "keys_values": self.keys_values, "other": self.other}
        return {**sums, "devices": dict(self.devices), **{k: v for k, v in asdict(self).items() if k != "devices"}}


def measure_bytes(cache: Any) -> CacheBytes:
    """Weigh a cache on its storages: what it keeps alive, not what its shapes show.

    A view counts as the whole storage behind it, and a storage that several tensors show counts once. Attributes,
    lists, dictionaries and dataclasses are looked into. Modules with their parameters, policies, functions and weak
    references are not: what they hold is not the cache's. Tensors on the `meta` device weigh nothing.

        measure_bytes(DynamicCache(...)).total            # any cache of transformers
        measure_bytes(KeepCache(...)).keys_values         # payload and slack
        measure_bytes(outputs.past_key_values).layers[0]  # one layer

    Args:
        cache: a cache of transformers, a KeepCache, tuples of keys and values, or anything that holds such.

    Raises:
        UnsupportedError: there is no cache in it, or a tensor without a storage (a sparse one).
    """
    if isinstance(cache, nn.Module):
        raise _no_cache(cache, "a model's weights are not its cache; pass what it returned as past_key_values")
    scale = _Scale()
    scale.weigh(cache)
    if not scale.found:
        raise _no_cache(cache, "pass past_key_values, or an object that holds them")
    return scale.result()


@dataclass(frozen=True, eq=False)
class _Place:
    """Something on the way: how it is reached, the layer it belongs to, and whether it is a part of keys or values."""

    value: Any
    path: str = ""
    name: str = ""
    layer: str = ""
    content: bool = False

    def attribute(self, name: str, value: Any) -> _Place:
        path = f"{self.path}.{name}" if self.path else name
        return _Place(value, path, name, self.layer, self.content or bool(_CONTENT.search(name)))

    def item(self, key: Any, value: Any) -> _Place:
        content = self.content or (isinstance(key, str) and bool(_CONTENT.search(key)))
        return _Place(value, f"{self.path}[{key!r}]", "", self.layer, content)

    def element(self, index: int, value: Any) -> _Place:
        path, layer = f"{self.path}[{index}]", self.layer
        if not layer and self.name in _LAYER_LISTS:
            layer = f"{self.path.removesuffix(self.name)}layers[{index}]"
        return _Place(value, path, "", layer, self.content)


@dataclass(eq=False)
class _Scale:
    """What has been weighed so far."""

    found: bool = False
    layers: dict[str, list[int]] = field(default_factory=dict)  # name -> keys and values, other
    devices: dict[str, int] = field(default_factory=dict)
    _storages: set[tuple[str, int]] = field(default_factory=set)
    _objects: set[int] = field(default_factory=set)

    def weigh(self, root: Any) -> None:
        """Everything that the root leads to; a stack, since caches may be nested deeper than Python recurses."""
        waiting = [_Place(root)]
        while waiting:
            place = waiting.pop()
            inside = self._tensor(place) if isinstance(place.value, Tensor) else self._object(place)
            waiting.extend(reversed(inside))

    def result(self) -> CacheBytes:
        parts = {name: LayerBytes(name, *weights) for name, weights in self.layers.items()}
        outside = parts.pop("", LayerBytes("", 0, 0))
        return CacheBytes(tuple(parts.values()), outside, self.devices)

    def _tensor(self, place: _Place) -> list[_Place]:
        tensor = place.value
        if isinstance(tensor, nn.Parameter):
            return []
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:  # a quantised tensor is made of others
            return [place.attribute(name, getattr(tensor, name)) for name in flatten()[0]]
        self.found = True
        weights = self.layers.setdefault(place.layer, [0, 0])
        if tensor.is_meta:
            return []
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError) as error:
            raise UnsupportedError(
                expected="tensors with a storage that can be weighed",
                received=f"{tensor.layout} at {place.path or 'the top'}: {error}",
                remedy="weigh the tensors that it is made of",
            ) from error
        size, device = storage.nbytes(), str(storage.device)
        if size and (device, storage.data_ptr()) not in self._storages:
            self._storages.add((device, storage.data_ptr()))
            weights[0 if place.content else 1] += size
            self.devices[device] = self.devices.get(device, 0) + size
        return []

    def _object(self, place: _Place) -> list[_Place]:
        value = place.value
        if isinstance(value, _SKIPPED) or _is_policy(value) or id(value) in self._objects:
            return []
        self._objects.add(id(value))
        if isinstance(value, Cache | CacheLayerMixin):
            self.found = True
        if place.layer:
            self.layers.setdefault(place.layer, [0, 0])
        inside: list[_Place] = []
        if isinstance(value, Mapping):
            inside += [place.item(key, item) for key, item in value.items()]
        elif isinstance(value, _SEQUENCES):
            if not place.path and _is_legacy(value):
                place = _Place(value, "", "layers", content=True)
            inside += [place.element(index, item) for index, item in enumerate(value)]
        attributes = sorted(_attributes(value), key=lambda pair: pair[0] != "layers")  # layers get what they share
        return inside + [place.attribute(name, item) for name, item in attributes]


def _is_policy(value: Any) -> bool:
    """Whether it decides what a cache keeps: a trained one has weights, which are no more the cache's than a model's.

    Asked of the class, since an instance's `__getattr__` may do anything.
    """
    return isinstance(value, OnlinePolicy) or all(hasattr(type(value), name) for name in ("needs", "judge", "choose"))


def _is_legacy(value: Any) -> bool:
    """Whether it is a sequence with a tuple of keys and values for each layer."""
    layers = [layer for layer in value if isinstance(layer, list | tuple) and layer]
    return bool(layers) and len(layers) == len(value) and all(isinstance(layer[0], Tensor) for layer in layers)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an instance and what its slots hold; properties are not computed."""
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield from own.items()
    for kind in type(value).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for name, member in vars(kind).items():
            if inspect.ismemberdescriptor(member):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # never set
                    continue


def _no_cache(received: Any, remedy: str) -> UnsupportedError:
    return UnsupportedError(
        expected="a key-value cache, or something that holds one",
        received=f"{type(received).__name__} without keys and values",
        remedy=remedy,
    )
