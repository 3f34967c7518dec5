"""Tasks by name."""

import pytest

from kvkeep.errors import TaskError
from kvkeep.tasks import registry
from kvkeep.tasks.protocols import Task
from kvkeep.tasks.registry import available_tasks, expand, register, task

RULER = (
    *(f"ruler/niah_single_{number}" for number in (1, 2, 3)),
    *(f"ruler/niah_multikey_{number}" for number in (1, 2, 3)),
    "ruler/niah_multivalue",
    "ruler/niah_multiquery",
    "ruler/vt",
    "ruler/cwe",
    "ruler/fwe",
    "ruler/qa_1",
    "ruler/qa_2",
)


def test_every_name_leads_to_a_task_of_that_name():
    assert set(RULER) | {"niah", "key_value", "multi_turn"} <= set(available_tasks())
    for name, entry in available_tasks().items():
        made: Task = task(name)
        assert made.name == entry.name == name
        assert entry.summary
        assert task(name.upper()) == made
    with pytest.raises(TypeError):
        available_tasks()["mine"] = None


def test_options_are_the_fields_of_the_class():
    assert available_tasks()["niah"].options() == ("depths", "haystack")
    assert available_tasks()["ruler/niah_single_2"].options() == ("wording", "haystack")
    assert task("niah", depths=(50,)).depths == (50,)
    with pytest.raises(TaskError, match="an option of niah; received 'depht'; did you mean 'depths'"):
        task("niah", depht=(50,))
    with pytest.raises(TaskError, match="an option of ruler/niah_single_2; received 'variant'"):
        task("ruler/niah_single_2", variant="niah_single_3")


def test_unknown_names_get_near_ones():
    with pytest.raises(TaskError, match="did you mean 'ruler/niah_single_1'"):
        task("ruler/niah_single1")
    with pytest.raises(TaskError, match="did you mean 'key_value'"):
        expand(["key-value"])


def test_a_family_is_not_a_task():
    with pytest.raises(TaskError, match=r"family of several; .*ruler/vt"):
        task("ruler")


def test_families_expand():
    assert expand(["ruler"]) == expand(["ruler/all"]) == expand("RULER") == RULER
    assert expand(["ruler/vt"]) == ("ruler/vt",)
    assert expand(["ruler/vt", "niah", "ruler"]) == (
        "ruler/vt",
        "niah",
        *(name for name in RULER if name != "ruler/vt"),
    )
    assert expand(["all"]) == tuple(available_tasks())
    assert expand([]) == ()


def test_others_can_be_registered(monkeypatch):
    monkeypatch.setattr(registry, "_tasks", dict(registry._tasks))
    register("mine/one", lambda size=3: size, summary="counts")
    assert task("mine/one", size=5) == 5
    assert available_tasks()["mine/one"].options() == ("size",)
    assert expand(["mine"]) == ("mine/one",)
    for name in ("mine/one", "mine", "niah", "ruler", "ruler/all", "all", "Mine", "a/b/c", ""):
        with pytest.raises(TaskError, match="choose another name"):
            register(name, lambda: None, summary="")
