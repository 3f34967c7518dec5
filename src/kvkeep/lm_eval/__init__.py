"""lm-evaluation-harness under a policy: any of its tasks, answered from a cache that was cut.

    python -m kvkeep.lm_eval --model kvkeep \\
        --model_args pretrained=smollm2-135m,policy=snapkv,compression_ratio=0.5 --tasks arc_easy

`python -m kvkeep.lm_eval` is the harness's own command, which knows one model more: the harness has no way to find
models of other packages by itself. In Python, `import kvkeep.lm_eval` makes the model known, after which
`lm_eval.simple_evaluate(model="kvkeep", model_args=...)` finds it.
"""

try:
    import lm_eval as _harness  # noqa: F401
except ImportError as error:
    raise ImportError('lm-eval is not installed; pip install "kvkeep[lm-eval]"') from error

from kvkeep.lm_eval.model import KvkeepLM

__all__ = ["KvkeepLM"]
