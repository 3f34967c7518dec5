"""For tests of policies and of code that uses kvkeep: shipped, so that users can test their own.

check_policy        does a policy keep its contract? answers in words
random_observation  what a policy sees of a layer, at random, in any shape
fake_model          a tiny random model of a supported architecture with its tokenizer; nothing is downloaded
"""

from __future__ import annotations

from kvkeep.testing.conformance import check_policy
from kvkeep.testing.models import fake_model
from kvkeep.testing.observations import gathered, ordinary_rotary, random_observation

__all__ = ["check_policy", "fake_model", "gathered", "ordinary_rotary", "random_observation"]
