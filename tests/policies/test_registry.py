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
    Allocator,
    Chunks,
    Critical,
    Entry,
    ExpectedAttention,
    Flat,
    Full,
    KNorm,
    KVzip,
    LagKV,
    Policy,
    Pyramid,
    Random,
    Scorer,
    SimLayer,
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
        ("SnapKV[pool=max] + Ada", Policy(SnapKV(pool="max"), Ada(), TopK())),
        ("ExPected-Attention", Policy(ExpectedAttention(), Uniform(), TopK())),
        ("snapkv+chunks[fill=TRUE]+ada", Policy(SnapKV(), Ada(), Chunks(fill=True))),
        ("chunkkv[length=5,window=3,shared=no]", Policy(SnapKV(window=3), Uniform(), Chunks(5, shared=False))),
        ("adasnapkv[safeguard=0.5]", Policy(SnapKV(), Ada(0.5), TopK())),
        ("chunkkv+topk", Policy(SnapKV(), Uniform(), TopK())),
        ("frc+topk", Policy(FRC(), Uniform(), TopK())),
        ("knorm+threshold[floor=8]", Policy(KNorm(), Threshold(8), TopK())),
        ("snapkv+threshold[floor=32,cap=2]", Policy(SnapKV(), Threshold(32, 2.0), TopK())),
        ("contour", Policy(KVzip(), Threshold(floor=32), TopK())),
        ("contour[floor=8]", Policy(KVzip(), Threshold(floor=8), TopK())),
        ("snapkv+flat[safeguard=0.5]", Policy(SnapKV(), Flat(0.5), TopK())),
        ("knorm+flat+critical[first=0.25]", Policy(KNorm(), Flat(), Critical(first=0.25))),
        ("adacriticalkv[window=64,safeguard=0.5]", Policy(SnapKV(64), Ada(0.5), Critical())),
        ("lagkv[lag=64,across=true]+ada", Policy(LagKV(lag=64, across=True), Ada(), TopK())),
        ("simlayer[recent=64]", SimLayer(recent=64)),
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
    assert policy_string(parse_policy("kvzip+threshold[floor=32]")) == "contour"
    assert policy_string(Policy(KNorm(), Uniform(), Chunks(shared=False))) == "knorm+chunks[shared=False]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapk", "a known policy; received 'snapk'; did you mean 'snapkv'.*known: adacriticalkv, "),
        ("SnapKVPress", "received 'SnapKVPress'; did you mean 'snapkv'"),
        ("ExpectedAttentionPress", "did you mean 'expected-attention'"),
        ("StreamingLLMPress", "did you mean 'streaming-llm'"),
        ("KnormPress", "did you mean 'knorm'"),
        ("press", "a known policy; received 'press'"),
        ("snapkv+PyramidPress", "received 'PyramidPress'; did you mean 'pyramid'"),
        ("snapkv+adda", "an allocator or a selector after .*; received 'adda'; did you mean 'ada'"),
        ("snapkv+knorm", "an allocator or a selector"),
        ("snapkv[windw=3]", "an option of snapkv; received 'windw'; did you mean 'window'"),
        ("snapkv[beta=3]", "an option of snapkv; received 'beta'"),
        ("snapkv+ada[window=3]", "an option of ada; received 'window'.*known: safeguard"),
        ("knorm+topk[k=3]", "topk has no options"),
        ("full[x=1]", "an option of full; received 'x'; full has no options"),
        ("full+ada", "'full' alone; received 'full\\+ada'"),
        ("simlayer+ada", "'simlayer' alone"),
        ("snapkv[window=many]", "type int for snapkv.window=...*received 'many'; the default is window=32"),
        ("snapkv[window=3.5]", "received '3.5'"),
        ("chunkkv[fill=maybe]", "type bool .*received 'maybe'"),
        ("snapkv[window=1,window=2]", "each once, in the brackets of 'snapkv'; received 'window=2'"),
        ("snapkv[window]", "received 'window'; for example"),
        ("snapkv[window=]", "received 'window='"),
        ("snapkv[window=3", "name\\[option=value"),
        ("snapkv]+ada", "name\\[option=value"),
        ("SnapKV(window=3)", "name\\[option=value"),
        ("ſnapkv", "name\\[option=value"),
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
        ("knorm+threshold[cap=0.5]", "cap=0 or cap >= 1"),
        ("knorm+threshold[cap=inf]", "cap=0 or cap >= 1"),
        ("knorm+flat[safeguard=2]", "0 <= safeguard <= 1"),
        ("criticalkv[first=1.5]", "0 <= first <= 1"),
        ("criticalkv[epsilon=-1]", "0 <= epsilon < 1"),
        ("lagkv[lag=1]", "lag >= 2"),
        ("lagkv[sinks=-1]", "sinks >= 0"),
        ("cur[window=1]", "window=0 or window >= 2"),
        ("cur[sinks=-1]", "sinks >= 0"),
        ("cur[combine=sum]", "combine one of product, mean, key, value"),
        ("simlayer[sinks=-1]", "sinks >= 0"),
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


@pytest.mark.parametrize("thing", [SnapKV(), SnapKV])
def test_a_scorer_is_told_what_a_policy_is_made_of(thing):
    with pytest.raises(PolicyError, match=r"Policy\(scorer, Uniform\(\), TopK\(\)\)"):
        parse_policy(thing)
    with pytest.raises(PolicyError, match=r"Policy\(scorer, Uniform\(\), TopK\(\)\)"):
        register("a-scorer", thing, summary="")
    assert "a-scorer" not in available_policies()


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_policies", dict(registry._policies))
    monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    monkeypatch.setattr(registry, "_plugins_are_in", False)


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
    assert policy_string(Policy(SnapKV(), Half(0.5), TopK())) == "snapkv+half[safeguard=0.5]"
    with pytest.raises(PolicyError, match="not taken"):
        register_part(Half)

    class Größe(Allocator):
        pass

    with pytest.raises(PolicyError, match="lower-case letters"):
        register_part(Größe)


# --- policies of other packages ---------------------------------------------------------------------------------------


class Point:
    """An entry point as importlib gives it."""

    def __init__(self, name, factory):
        self.name, self.value, self.load = name, f"their_package:{name}", lambda: factory


@pytest.fixture
def install(monkeypatch, clean_registry):
    def install(**factories):
        points = [Point(name, factory) for name, factory in factories.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "kvkeep.policies" else [])

    return install


def test_policies_of_other_packages(install):
    class Shaped(Full):
        """

        A shape of its own.

        And more.
        """

    entry = Entry("entered", Policy(SnapKV(window=5), Uniform(), TopK()), "their summary", "their paper")
    install(theirs=lambda: Policy(KNorm(), Uniform(), TopK()), shaped=Shaped, entered=lambda: entry)
    known = available_policies()
    assert known["theirs"].summary == KNorm.__doc__.split("\n")[0].rstrip(".")
    assert known["theirs"].paper == ""
    assert known["shaped"].summary == "A shape of its own"
    assert known["entered"] == entry
    assert parse_policy("theirs+ada") == Policy(KNorm(), Ada(), TopK())


def test_a_broken_plugin_costs_nobody_else_a_policy(install):
    def broken():
        raise ZeroDivisionError("their mistake")

    install(broken=broken, snapkv=Full, nothing=lambda: None, Upper=Full, scorer=SnapKV, theirs=Full)
    with pytest.warns(UserWarning, match="is left out") as caught:
        known = available_policies()
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 5
    assert messages[0] == (
        "the policy 'broken' of another package (their_package:broken) is left out: ZeroDivisionError: their mistake"
    )
    assert "'snapkv' of another package" in messages[1]
    assert "not taken" in messages[1]
    assert "received None" in messages[2]
    assert "lower-case" in messages[3]
    assert "Policy(scorer, Uniform(), TopK())" in messages[4]
    assert known["theirs"].policy == Full()
    assert parse_policy("snapkv") == Policy(SnapKV(), Uniform(), TopK())
    assert available_policies() == known  # without further warnings, which would be errors here


def test_a_plugin_may_build_on_our_names(install):
    install(theirs=lambda: parse_policy("snapkv[window=5]+ada"))
    assert parse_policy("theirs") == Policy(SnapKV(window=5), Ada(), TopK())


# --- texts of policies of one's own -----------------------------------------------------------------------------------


def assert_described(policy, *words):
    text = policy_string(policy)
    assert text.startswith("custom:")
    for word in words:
        assert word in text
    with pytest.raises(PolicyError, match=r"must be given as an object, for example KeepCache\.load\(policy=\.\.\.\)"):
        parse_policy(text)


def test_a_policy_without_a_name_is_described():
    class Unnamed(Mine):
        name: ClassVar[str] = "unnamed"

    module = Unnamed.__module__
    assert_described(
        Policy(Unnamed(3), Ada(), TopK()), f"custom:{module}.", "Unnamed(width=3)+kvkeep", "Ada(safeguard="
    )


def test_a_child_of_a_registered_scorer_is_not_its_parent():
    class My(SnapKV):
        def score(self, observation):
            return -super().score(observation)

    assert_described(Policy(My(), Uniform(), TopK()), "My(window=32")
    assert_described(Policy(My(window=5), Ada(), TopK()), "My(window=5")


def test_a_child_of_a_registered_part_is_not_its_parent():
    class Half(Ada):
        name: ClassVar[str] = "ada"

    assert_described(Policy(SnapKV(), Half(), TopK()), "Half(safeguard=0.2)")


def test_a_policy_of_another_shape_is_described():
    class Plain:
        scope = "layer"
        needs = judge = choose = None

    assert_described(Plain(), "Plain(...)")  # without an address
    assert policy_string(Plain()) == policy_string(Plain())


def test_options_that_no_text_can_hold_are_described():
    assert_described(Policy(H2O(recent=0.25), Uniform(), Chunks(length=20.5)), "Chunks(length=20.5")
    assert policy_string(Policy(SnapKV(window=True), Uniform(), TopK())).startswith("custom:")


@dataclass(frozen=True)
class Titled(Scorer):
    """Its name is an option, and not the one that it is registered under."""

    name: str = "my-scorer"
    window: int = 3
    safeguard: float = 0.5

    def score(self, observation):
        return observation.zeros()


@pytest.mark.usefixtures("clean_registry")
def test_the_registered_name_is_written_not_the_scorers():
    register("mine", Policy(Titled(), Uniform(), TopK()), summary="")
    policy = parse_policy("mine[window=5]")
    assert policy_string(policy) == "mine[window=5]"
    assert policy_string(Policy(Titled(window=5), Pyramid(), TopK())) == "mine[window=5]+pyramid"
    assert policy_string(Policy(Titled(name="other"), Uniform(), TopK())) == "mine[name=other]"
    register("my-scorer", Policy(Titled(), Ada(), TopK()), summary="")  # the one called like the scorer comes first
    assert policy_string(Policy(Titled(window=5), Ada(), TopK())) == "my-scorer[window=5]"
    assert policy_string(Policy(Titled(window=5), Pyramid(), TopK())) == "my-scorer[window=5]+pyramid"
    both = Policy(Titled(safeguard=0.3), Ada(), TopK())  # `my-scorer[safeguard=0.3]` would change both parts
    assert policy_string(both) == "mine[safeguard=0.3]+ada"


@pytest.mark.usefixtures("clean_registry")
def test_a_child_of_policy_stays_one():
    class Careful(Policy):
        pass

    register("careful", Careful(SnapKV(), Uniform(), TopK()), summary="")
    policy = parse_policy("careful[window=5]+ada")
    assert policy == Careful(SnapKV(window=5), Ada(), TopK())
    assert policy_string(policy) == "careful[window=5]+ada"
    assert_described(type("Other", (Policy,), {})(SnapKV(), Uniform(), TopK()), "Other")


@pytest.mark.usefixtures("clean_registry")
def test_options_that_cannot_be_compared_do_no_harm():
    class Ambiguous:
        def __eq__(self, other):
            raise RuntimeError("ambiguous, as the truth of a tensor is")

        __hash__ = None

    register("mine", Policy(Mine(Ambiguous()), Uniform(), TopK()), summary="")
    assert policy_string(parse_policy("mine")) == "mine"
    assert policy_string(Policy(Mine(Ambiguous()), Uniform(), TopK())).startswith("custom:")
