"""The attention paths that tests on the CPU compare; the compiled one only where it was built.

Those for GPUs have tests of their own: test_triton.py, test_varlen.py.
"""

from __future__ import annotations

import pytest

from kvkeep.attention import dispatch, native

ON_CPU = {name: path for name, path in dispatch.PATHS.items() if name not in ("triton", "varlen")}
PATHS = {name: path for name, path in ON_CPU.items() if name != "native" or native.is_available()}

needs_native = pytest.mark.skipif(not native.is_available(), reason="kvkeep was installed without a C++ compiler")

# As parameters of a test: what was not built is skipped in the open.
PATH_PARAMETERS = [pytest.param(name, marks=needs_native if name == "native" else ()) for name in ON_CPU]
