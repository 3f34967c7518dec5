"""The compiled module, from `native/module.cpp`."""

def instruction_sets() -> list[str]: ...
def use_runtime(gomp_parallel: int) -> None: ...
def attend(
    type: int,
    query: int,
    output: int,
    prefix_keys: int,
    prefix_values: int,
    offsets: int,
    tail_keys: int,
    tail_values: int,
    tail_valid: int,
    query_row_stride: int,
    query_head_stride: int,
    query_token_stride: int,
    tail_length: int,
    tail_capacity: int,
    scaling: float,
    rows: int,
    heads: int,
    kv_heads: int,
    queries: int,
    size: int,
    threads: int,
    instruction_set: str,
) -> None: ...
def read_all(memory: int, bytes: int, threads: int) -> int: ...
