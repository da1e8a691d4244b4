# SPDX-License-Identifier: Apache-2.0
"""A drafter with one text, whose context the test gives by hand."""

import torch


class OneText:
    """The only request of a drafter: `add_context` as after a pass of the target, `propose` as in a round."""

    def __init__(self, drafter):
        self.drafter, self.request = drafter, drafter._stock_request(torch.zeros(1, 0, dtype=torch.long))

    def add_context(self, hidden_states, num_tokens, model_kwargs):
        self.drafter.add_context(self.request, hidden_states, num_tokens, model_kwargs)

    def propose(self, text):
        """The proposal after `text`, which ends with the anchor."""
        self.request.input_ids = text
        (proposal,) = self.drafter.propose([self.request])
        return proposal
