"""What a run found: rows, the log that keeps them, statistics over them, and the report.

Rows and the log need nothing beyond kvkeep's own dependencies. `frame`, `statistics`, `claims` and `report` need the
extras `bench` and `report`, and are imported by name.
"""

from kvkeep.results.log import ResultLog, read_rows
from kvkeep.results.rows import (
    FULL,
    PROTOCOLS,
    SCHEMA_VERSION,
    Fidelity,
    Key,
    Memory,
    Row,
    Times,
    row_key,
)

__all__ = [
    "FULL",
    "PROTOCOLS",
    "SCHEMA_VERSION",
    "Fidelity",
    "Key",
    "Memory",
    "ResultLog",
    "Row",
    "Times",
    "read_rows",
    "row_key",
]
