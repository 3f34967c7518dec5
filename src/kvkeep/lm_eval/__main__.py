"""`python -m kvkeep.lm_eval`: the harness's command, with kvkeep's model known to it."""

from lm_eval.__main__ import cli_evaluate

import kvkeep.lm_eval  # noqa: F401  registers the model

if __name__ == "__main__":
    cli_evaluate()
