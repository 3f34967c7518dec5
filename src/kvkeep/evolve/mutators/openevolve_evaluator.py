"""The evaluation file that OpenEvolve is given: it sends a program to where the model is, and waits for its metrics.

OpenEvolve executes this file in its own processes, and anew for each of them: nothing else of kvkeep, no model and no
program runs there.
"""

from __future__ import annotations

import json
import os
import urllib.request

URL = "KVKEEP_EVALUATOR_URL"
KEY = "KVKEEP_EVALUATOR_KEY"
SECONDS = "KVKEEP_EVALUATOR_SECONDS"

# Below every score. OpenEvolve compares whatever it is told: the score of a first stage, or the mean of other numbers
# where there is no score, would compete with whole evaluations, and failing on purpose could win.
NOT_EVALUATED = -1e9


def evaluate(program_path: str) -> dict[str, float]:
    """The metrics of the program in a file; `combined_score` is `NOT_EVALUATED` for whatever goes wrong."""
    try:
        with open(program_path, "rb") as file:
            source = file.read()
        request = urllib.request.Request(os.environ[URL], data=source, headers={"X-Key": os.environ[KEY]})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
        with opener.open(request, timeout=float(os.environ[SECONDS])) as response:
            metrics: dict[str, float] = json.loads(response.read())
            return metrics
    except Exception:  # OpenEvolve gives an evaluation that raises a score of 0, and asks again three times
        return {"combined_score": NOT_EVALUATED}
