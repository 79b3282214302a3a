"""Budget, protection and seed of each row of a batch.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Sequence

from kvpop_vllm.config import ConfigError, protection
from kvpop_vllm.kernels.draws import request_seed
from kvpop_vllm.policies import Policy
from kvpop_vllm.requests import BUDGET, RequestSlots, resolve


class Rows:
    """Budgets, protection and seeds of rows. Each is one value for all rows, or a list.

    Args:
        budget: B of the rows, see :class:`kvpop_vllm.hf.KVpopCache`.
        protect_prompt: protection of the rows, see :class:`kvpop_vllm.hf.KVpopCache`.
        seed: seeds of the rows, see :class:`kvpop_vllm.hf.KVpopCache`.
        prompt: number of tokens that are a prompt, see :class:`kvpop_vllm.hf.KVpopCache`.

    Attributes:
        number: length of the lists, None if there is no list.
    """

    def __init__(self, budget, protect_prompt, seed, prompt=None):
        self.budget, self.protect_prompt, self.seed = budget, protect_prompt, seed
        lists = {name: value for name, value in vars(self).items() if _several(value)}
        lengths = {name: len(value) for name, value in lists.items()}
        if len(set(lengths.values())) > 1 or 0 in lengths.values():
            sizes = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ConfigError(f"lists have an entry for each row of the batch, but {sizes}: make them equally long")
        self.prompt = prompt
        self.number = next(iter(lengths.values()), None)
        seeds = seed if _several(seed) else [seed]
        if wrong := [entry for entry in seeds if type(entry) is not int]:
            raise ConfigError(f"seed must be an integer, got {wrong[0]!r}")

    def settings(self) -> dict:
        """Return the settings that the policy is resolved with.

        They are the largest budget and the first row's protection.
        """
        budget = self.budget
        # pages are allocated for the largest budget
        if _several(budget):
            if wrong := [entry for entry in budget if type(entry) is not int]:
                raise ConfigError(f"budget must be an integer for each row, got {wrong[0]!r}")
            budget = max(budget)
        protect = self.protect_prompt[0] if _several(self.protect_prompt) else self.protect_prompt
        return {"budget": budget, "protect_prompt": protect}

    def check(self, policy: Policy) -> None:
        """Check the budgets and protection of all rows under the policy."""
        if self.prompt is not None and not (policy.compresses and type(self.prompt) is int and self.prompt > 0):
            raise ConfigError(
                f"prompt must be a number of tokens, for a policy that compresses prompts, got {self.prompt!r}"
            )
        for budget in self.budget if _several(self.budget) else ():
            policy.retention_of(budget)
        if _several(self.protect_prompt):
            entries = [protection(entry) for entry in self.protect_prompt]
            if policy.compresses and any(entry is not None for entry in entries):
                raise ConfigError(
                    f"--kv-policy {policy.name} holds the prompt until its end anyway: leave protect_prompt out"
                )
            self.protect_prompt = [policy.default_protect if entry is None else entry for entry in entries]

    def check_number(self, rows: int) -> None:
        """Check that a batch has as many rows as the lists.

        Raises:
            ValueError: it has not.
        """
        if self.number not in (None, rows):
            raise ValueError(
                f"a batch of {rows} rows for a KVpopCache with lists of {self.number}: give one entry for each row"
            )

    def protects(self, policy: Policy, rows: int) -> list[bool | int]:
        """Return the number of protected tokens of each row, True for the whole prompt."""
        if _several(self.protect_prompt) and not policy.compresses:
            return self.protect_prompt
        return [policy.protect if self.prompt is None else self.prompt] * rows

    def any_protects(self, policy: Policy) -> bool:
        """Return whether any row protects its prompt."""
        return any(self.protects(policy, 1))

    def head_budgets(self, policy: Policy) -> dict[int, list[list[int]]] | None:
        """Return the budgets ``[layers][H]`` of the heads by the B of the rows, or None if all heads have their row's."""
        # the kernels then take one number for all heads of a row
        if not policy.unequal:
            return None
        budgets = self.budget if _several(self.budget) else [policy.retention.budget]
        rows = map(policy.retention_of, budgets)
        return {retention.budget: policy.budgets_of(retention).tolist() for retention in rows}

    def requests(self, policy: Policy, rows: int, cartridge_slots: int = 0) -> list[RequestSlots]:
        """Return the record of each row, which begins with slots of cartridges and the prefix of the text to come."""
        budgets = self.budget if _several(self.budget) else [None] * rows
        seeds = self.seed if _several(self.seed) else [self.seed] * rows
        return [
            resolve(policy, {BUDGET: budget}, 0)._replace(made_slots=cartridge_slots, seed=request_seed(0, seed))
            for budget, seed in zip(budgets, seeds, strict=True)
        ]


def _several(value) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
