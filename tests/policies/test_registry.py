"""Policies by name: the grammar, its errors, and the way back from a policy to its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvkeep.errors import PolicyError
from kvkeep.policies import (
    FRC,
    H2O,
    Ada,
    Chunks,
    Full,
    KNorm,
    Policy,
    Pyramid,
    Random,
    Scorer,
    SnapKV,
    Threshold,
    TopK,
    Uniform,
    available_policies,
    parse_policy,
    part_types,
    policy_string,
    register,
    register_part,
    registry,
)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("full", Full()),
        ("snapkv", Policy(SnapKV(), Uniform(), TopK())),
        (" snapkv ", Policy(SnapKV(), Uniform(), TopK())),
        ("snapkv[]", Policy(SnapKV(), Uniform(), TopK())),
        ("snapkv[window=64,kernel=5]", Policy(SnapKV(window=64, kernel=5), Uniform(), TopK())),
        ("snapkv[ pool = max , ]", Policy(SnapKV(pool="max"), Uniform(), TopK())),
        ("snapkv+ada", Policy(SnapKV(), Ada(), TopK())),
        ("snapkv + ada", Policy(SnapKV(), Ada(), TopK())),
        ("snapkv[window=64]+ada[safeguard=0]+chunks[length=8]", Policy(SnapKV(64), Ada(0.0), Chunks(length=8))),
        ("snapkv+chunks[fill=TRUE]+ada", Policy(SnapKV(), Ada(), Chunks(fill=True))),
        ("chunkkv[length=5,window=3,shared=no]", Policy(SnapKV(window=3), Uniform(), Chunks(5, shared=False))),
        ("adasnapkv[safeguard=0.5]", Policy(SnapKV(), Ada(0.5), TopK())),
        ("chunkkv+topk", Policy(SnapKV(), Uniform(), TopK())),
        ("frc+topk", Policy(FRC(), Uniform(), TopK())),
        ("knorm+threshold[floor=8]", Policy(KNorm(), Threshold(8), TopK())),
        ("random[seed=3]+pyramid[beta=2]", Policy(Random(3), Pyramid(2.0), TopK())),
        ("h2o[recent=0.25]", Policy(H2O(0.25), Uniform(), TopK())),
    ],
)
def test_texts_name_policies(text, policy):
    assert parse_policy(text) == policy
    assert parse_policy(policy) is policy
    assert parse_policy(policy_string(policy)) == policy


@pytest.mark.parametrize("name", available_policies())
def test_every_registered_policy_comes_back(name):
    entry = available_policies()[name]
    assert policy_string(parse_policy(name)) == name
    assert entry.summary
    for option, default in entry.options().items():
        assert parse_policy(f"{name}[{option}={default}]") == entry.policy


def test_the_shortest_text_is_written():
    assert policy_string(Policy(SnapKV(), Ada(), TopK())) == "adasnapkv"
    assert policy_string(Policy(SnapKV(window=64), Ada(), TopK())) == "snapkv[window=64]+ada"
    assert policy_string(Policy(FRC(), Uniform(), TopK())) == "frc+topk"
    assert policy_string(Policy(KNorm(), Uniform(), Chunks(shared=False))) == "knorm+chunks[shared=False]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapk", "a known policy; received 'snapk'; did you mean 'snapkv'.*known: adasnapkv, "),
        ("snapkv+adda", "an allocator or a selector after .*; received 'adda'; did you mean 'ada'"),
        ("snapkv+knorm", "an allocator or a selector"),
        ("snapkv[windw=3]", "an option of snapkv; received 'windw'; did you mean 'window'"),
        ("snapkv[beta=3]", "an option of snapkv; received 'beta'"),
        ("snapkv+ada[window=3]", "an option of ada; received 'window'.*known: safeguard"),
        ("knorm+topk[k=3]", "topk has no options"),
        ("full[x=1]", "an option of full; received 'x'; full has no options"),
        ("full+ada", "'full' alone; received 'full\\+ada'"),
        ("snapkv[window=many]", "type int for snapkv.window=...*received 'many'; the default is window=32"),
        ("snapkv[window=3.5]", "received '3.5'"),
        ("chunkkv[fill=maybe]", "type bool .*received 'maybe'"),
        ("snapkv[window=1,window=2]", "each once, in the brackets of 'snapkv'; received 'window=2'"),
        ("snapkv[window]", "received 'window'; for example"),
        ("snapkv[window=]", "received 'window='"),
        ("snapkv[window=3", "name\\[option=value"),
        ("snapkv]+ada", "name\\[option=value"),
        ("SnapKV", "name\\[option=value"),
        ("", "name\\[option=value"),
        ("snapkv+", "name\\[option=value"),
        ("snapkv ada", "name\\[option=value"),
    ],
)
def test_texts_that_name_nothing(text, message):
    with pytest.raises(PolicyError, match=message):
        parse_policy(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapkv[window=0]", "window >= 1; received window=0"),
        ("snapkv[kernel=4]", "an odd kernel; received kernel=4"),
        ("snapkv[kernel=-1]", "an odd kernel; received kernel=-1"),
        ("snapkv[pool=sum]", "pool avg or max; received pool=sum"),
        ("frc[window=65]", "received window=65, queries=64"),
        ("h2o[recent=0.6]", "0 <= recent <= 0.5"),
        ("finch[window=0]", "window >= 1"),
        ("expected-attention[future=0]", "future >= 1"),
        ("expected-attention[sinks=-1]", "sinks >= 0"),
        ("streaming-llm[sinks=-1]", "sinks >= 0"),
        ("adasnapkv[safeguard=1.1]", "0 <= safeguard <= 1"),
        ("adasnapkv[safeguard=nan]", "0 <= safeguard <= 1"),
        ("pyramidkv[beta=0.5]", "beta >= 1"),
        ("pyramidkv[beta=nan]", "beta >= 1"),
        ("knorm+threshold[floor=-1]", "floor >= 0"),
        ("chunkkv[length=0]", "length >= 1"),
    ],
)
def test_options_that_make_no_sense(text, message):
    with pytest.raises(PolicyError, match=message):
        parse_policy(text)


@pytest.mark.parametrize("thing", [None, 3, SnapKV(), SnapKV, Policy, Full, TopK()])
def test_things_that_are_no_policy(thing):
    with pytest.raises(PolicyError, match="a policy or its name"):
        parse_policy(thing)


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_policies", dict(registry._policies))
    monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    registry._load_entry_points.cache_clear()
    yield
    registry._load_entry_points.cache_clear()


@dataclass(frozen=True)
class Mine(Scorer):
    width: int | None = None
    name: ClassVar[str] = "mine"

    def score(self, observation):
        return observation.zeros()


@pytest.mark.usefixtures("clean_registry")
def test_registering():
    register("mine", Policy(Mine(), Uniform(), TopK()), summary="a test")
    assert parse_policy("mine[width=5]+ada") == Policy(Mine(5), Ada(), TopK())
    assert policy_string(Policy(Mine(5), Uniform(), TopK())) == "mine[width=5]"
    with pytest.raises(PolicyError, match="a name that is not taken; received 'mine'"):
        register("mine", Full(), summary="")
    with pytest.raises(PolicyError, match="not taken; received 'ada'"):
        register("ada", Full(), summary="")
    for name in ("Mine", "a b", "a[b]", "", "-a"):
        with pytest.raises(PolicyError, match="lower-case letters"):
            register(name, Full(), summary="")


@pytest.mark.usefixtures("clean_registry")
def test_registering_parts():
    class Half(Ada):
        name: ClassVar[str] = "half"

    register_part(Half)
    assert isinstance(parse_policy("snapkv+half").allocator, Half)
    assert part_types()["half"] is Half
    with pytest.raises(PolicyError, match="not taken"):
        register_part(Half)


@pytest.mark.usefixtures("clean_registry")
def test_policies_of_other_packages(monkeypatch):
    class Point:
        name, value = "theirs", "their_package:make"

        @staticmethod
        def load():
            return lambda: Policy(KNorm(), Uniform(), TopK())

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point] if group == "kvkeep.policies" else [])
    assert available_policies()["theirs"].paper == "their_package:make"
    assert parse_policy("theirs+ada") == Policy(KNorm(), Ada(), TopK())


def test_a_policy_without_a_name_is_written_as_far_as_possible():
    class Unnamed(Mine):
        name: ClassVar[str] = "unnamed"

    assert policy_string(Policy(Unnamed(3), Ada(), TopK())) == "unnamed[width=3]+ada+topk"
