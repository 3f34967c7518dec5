"""The command line: parses, calls, prints. What it calls stands in the other rooms.

Commands import torch and transformers in their bodies, so that help is there at once.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from kvkeep import __version__
from kvkeep.cli import audit, bench, calibrate, demo, evolve, lab, models, plan, policies, run, show, train, tune
from kvkeep.cli.options import unreadable
from kvkeep.cli.output import print_error, show_warning
from kvkeep.errors import KvkeepError

app = App(
    name="kvkeep",
    help="Keep the entries of a key-value cache that matter, physically delete the rest.",
    version=__version__,
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)
for _command in (
    run.run,
    demo.demo,
    show.show,
    bench.bench,
    audit.audit,
    bench.report,
    tune.tune,
    evolve.evolve,
    calibrate.calibrate,
    plan.plan,
    policies.policies,
    models.models,
):
    app.command(_command)
app.command(lab.lab)
app.command(train.train)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; the process's own where None.

    Returns:
        The exit status: 0; 2 for a command line that cannot be read and for an error that kvkeep explains; 130 after
        Ctrl-C; 1 where the reader of the output went away.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words  # also where the rest of the command line cannot be read
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model may say what a terminal cannot show
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            app(words, exit_on_error=False, print_error=not as_json)
            sys.stdout.flush()
        except CycloptsError as error:
            if as_json:
                print_error(unreadable(str(error), error.command_chain or ()), as_json=True)
            return 2
        except KvkeepError as error:
            print_error(error, as_json=as_json)
            return 2
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            # Python flushes stdout once more when it ends, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    return 0
