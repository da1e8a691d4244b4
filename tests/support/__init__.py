# SPDX-License-Identifier: Apache-2.0
"""What tests share: tiny models, drafts, tokenizers, servers and the one rule of comparison."""
