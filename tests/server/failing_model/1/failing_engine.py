"""An engine process that dies of one prompt."""

from __future__ import annotations

from sangam_backend.plan import StepPlan
from sangam_backend.runner import Launch, Runner
from sangam_backend.server.engine_process import main

POISON = [13, 13, 13]

launch = Runner.launch


def fail_on_poison(runner: Runner, plan: StepPlan) -> Launch:
    if any(row.request.prompt == POISON for row in plan.rows):
        raise RuntimeError("poisoned")
    return launch(runner, plan)


Runner.launch = fail_on_poison  # type: ignore[assignment, method-assign]
main()
