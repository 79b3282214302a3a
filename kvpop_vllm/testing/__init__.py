"""Oracles, input factories and error budgets for tests.

This subpackage imports nothing else of the package, so that the code under test cannot influence the result.
"""

from .budgets import DisturbedSums, ErrorBudget, assert_within_budget, eager_runs
from .models import (
    random_prompt,
    require_distant_influence,
    write_random_scorer,
    write_tiny_model,
)
from .oracle import (
    OracleModel,
    OracleRun,
    derived_budget,
    derived_margin_bound,
    margin_bound,
)
from .oracle_coupled import corrected_attention, masked_attention, masked_lse, retained_by_attention
from .oracle_kinds import BFLOAT16, FAMILIES, KindsOracle, require_distant_kinds, write_mixed_model
from .oracle_online import decision_margins, retained_sets, retained_sets_static
from .oracle_policy import LayerDecisions, OraclePolicy
from .oracle_scores import log_gamma, raw_scores, read_scorer
