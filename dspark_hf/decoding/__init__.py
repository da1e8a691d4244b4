# SPDX-License-Identifier: Apache-2.0
"""One round after the other: draft, verify, accept, commit."""
