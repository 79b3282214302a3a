"""Requests with a seed on a CPU, whose draws vLLM's model runner cannot take back.

A step draws a token for every request in it. Where a prompt is not yet read to its end, the token is discarded, and the
runner takes the draw back by ``Generator.set_offset``. Generators of a CPU have no offset, so the whole engine stops.
"""

import numpy as np

_STATES = "_kvpop_states"


def sample(original, self, *args, **kwargs):
    """Keep the state of each generator whose draw will be discarded."""
    generators = self.input_batch.generators
    if self.device.type == "cpu" and generators:
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        self.__dict__[_STATES] = {row: generators[row].get_state() for row in discarded if row in generators}
    return original(self, *args, **kwargs)


def bookkeeping_sync(original, self, *args, **kwargs):
    """Set the kept states again, and hide their generators from vLLM's own way."""
    states, generators = self.__dict__.pop(_STATES, {}), self.input_batch.generators
    hidden = {row: generators.pop(row) for row in states}
    for row, generator in hidden.items():
        generator.set_state(states[row])
    try:
        return original(self, *args, **kwargs)
    finally:
        generators.update(hidden)
